"""What the kernels serve, as predicates with a reason, asked by dispatcher, errors and tests. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from prefixonce.errors import UnsupportedError

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MAX_GQA_GROUP = 16
QUERY_DTYPES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"
_FP8_CAPABILITY = (8, 9)  # Triton converts e4m3 from Ada on
_HOPPER_HEAD_DIMS = (64, 128)  # powers of two whose tiles fit the register file beside the accumulators


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Heads of one rank and their dtypes, by torch's names. `sliding_window` 0 means none."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    sliding_window: int = 0

    @property
    def gqa_group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


def unsupported_reason(spec: HeadSpec, capability: tuple[int, int]) -> str | None:
    """Why no kernel of ours serves `spec` on this compute capability, or None."""
    if spec.num_kv_heads < 1 or spec.num_q_heads % spec.num_kv_heads:
        return f"{spec.num_q_heads} query heads do not divide by {spec.num_kv_heads} KV heads"
    if not 1 <= spec.gqa_group <= MAX_GQA_GROUP:
        return f"GQA group {spec.gqa_group} is outside 1..{MAX_GQA_GROUP}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.q_dtype not in QUERY_DTYPES:
        return f"query dtype {spec.q_dtype} is not one of {', '.join(QUERY_DTYPES)}"
    if spec.kv_dtype not in (spec.q_dtype, FP8):
        return f"K/V dtype {spec.kv_dtype} is neither the query's {spec.q_dtype} nor {FP8}"
    if spec.kv_dtype == FP8 and capability < _FP8_CAPABILITY:
        return f"{FP8} K/V needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    if spec.sliding_window:
        return f"sliding window of {spec.sliding_window} keys: every kernel here attends to all keys"
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is under 8.0"
    return None


def check(spec: HeadSpec, capability: tuple[int, int]) -> None:
    """Raises UnsupportedError with the reason, before anything is launched."""
    reason = unsupported_reason(spec, capability)
    if reason is not None:
        raise UnsupportedError(f"{reason}; serve this model with the stock backend")


def hopper_unsupported_reason(spec: HeadSpec, capability: tuple[int, int]) -> str | None:
    """Why the TMA/wgmma kernel cannot serve what the portable kernels can, or None."""
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} is not Hopper"
    if spec.head_dim not in _HOPPER_HEAD_DIMS:
        return f"head_dim {spec.head_dim} is not one of {', '.join(map(str, _HOPPER_HEAD_DIMS))}"
    if spec.kv_dtype != spec.q_dtype:
        return f"K/V dtype {spec.kv_dtype} differs from the query's {spec.q_dtype}"
    return None


def layout_reason(
    shape_k: tuple[int, ...],
    shape_v: tuple[int, ...],
    stride_k: tuple[int, ...],
    stride_v: tuple[int, ...],
    spec: HeadSpec,
) -> str | None:
    """Why pools `[slots, kv_heads, head_dim]` of these shapes and element strides cannot be read, or None.

    K and V may have different strides (carved from wider buffers, heads before slots); head_dim must be contiguous.
    """
    if len(shape_k) != 3 or shape_k != shape_v:
        return f"K is {list(shape_k)} and V {list(shape_v)}; both must be [slots, kv_heads, head_dim]"
    if shape_k[1:] != (spec.num_kv_heads, spec.head_dim):
        return f"K/V have {shape_k[1]} heads of {shape_k[2]}, planned for {spec.num_kv_heads} of {spec.head_dim}"
    if stride_k[2] != 1 or stride_v[2] != 1:
        return f"head_dim has stride {stride_k[2]} in K and {stride_v[2]} in V; it must be 1"
    return None


def hopper_layout_reason(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], addresses: tuple[int, ...]
) -> str | None:
    """Why q, K and V (K and V of `shape`) at these strides and addresses do not suit 16-byte copies, or None."""
    if any(address % 16 for address in addresses):
        return "q, K or V does not start at a multiple of 16 bytes"
    if any(stride % 16 for of_tensor in strides for stride in of_tensor[:2]):
        return f"strides {strides} of q, K and V are not all multiples of 16 elements"
    if any(shape[1] * of_tensor[1] >= 2**31 for of_tensor in strides[1:]):
        return f"heads lie {max(of_tensor[1] for of_tensor in strides[1:])} elements apart; a copy reaches 2^31"
    return None
