"""Attention of one decode step and layer: the chosen passes, prefix and suffix side by side, then the merge.

    planner = StepPlanner(HeadSpec(32, 8, 128), max_batch=256, max_tokens=1 << 20, device="cuda")
    planner.update(step, choice, req_to_token, req_pool_indices)     # once per step, outside a captured graph
    attend(planner, q, k_pool, v_pool, out, scale=head_dim ** -0.5)  # every layer; capturable

A graph captured around `attend(..., passes=P)` with q of `padded_batch` rows replays any later
`update(..., padded_batch=..., captured=P)`. A single pass is what `attend` does for a step that needs only it: a step
without groups is paged decode, a step whose rows end with their prefix is the prefix pass and its merge.

Same plan and inputs give the same bits: no atomics, every sum in planned order. Where keys are cut depends on the batch
unless `split_tokens` is set; cuts move a result by fp32 rounding only (about 1e-6 relative, before the output dtype).
With `split_tokens` a row's bits depend on its own keys, its group's prefix and its path, not on the rest of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from prefixonce import limits
from prefixonce.cascade import prefix_kernel
from prefixonce.errors import LayoutError
from prefixonce.limits import HeadSpec
from prefixonce.merge import merge_pieces, merge_step_kernel
from prefixonce.paged import paged_kernel
from prefixonce.planner import Overlap, Pass, StepPlanner
from prefixonce.workplan import PREFIX_ITEM_WIDTH, SUFFIX_ITEM_WIDTH

_LARGE_MERGE_ROWS = 4096  # query rows that fill the device with programs of several heads

__all__ = ["HeadSpec", "Overlap", "Pass", "StepPlanner", "attend", "merge_pieces"]


def attend(
    planner: StepPlanner,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lse: Tensor | None = None,
    passes: Pass | None = None,
) -> Tensor:
    """Writes and returns `out` [batch, q_heads, head_dim] for q of that shape and the planner's current step.

    k and v [slots, kv_heads, head_dim] may differ in strides; rows past the step's are padding and become 0.
    `lse` fp32 [batch, q_heads] receives natural-log LSE. `soft_cap` 0 is off; K/V are multiplied by their scales.
    `passes` are the kernels to launch, by default those that the step needs; raises LayoutError on any mismatch.
    """
    _check(planner, q, k, v, out, lse, scale * k_scale)
    chosen = planner.passes if passes is None else passes
    if planner.passes & ~chosen:
        raise LayoutError(f"the step needs {planner.passes}, asked to launch only {chosen}")
    call = _Call(planner, q, k, v, out, lse, scale * k_scale, soft_cap, v_scale)
    prefix = chosen & (Pass.DENSE | Pass.GATHER)
    beside = planner.prefix_stream
    if prefix and Pass.SUFFIX in chosen and beside is not None:
        current = torch.cuda.current_stream(q.device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            call.prefix(prefix)
        call.suffix()
        current.wait_stream(beside)
    else:
        if prefix:
            call.prefix(prefix)
        if Pass.SUFFIX in chosen:
            call.suffix()
    if Pass.MERGE in chosen:
        call.merge()
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments of one `attend`, shared by its launches."""

    planner: StepPlanner
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    scale: float
    soft_cap: float
    v_scale: float

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def launches_early(self) -> bool:
        """Whether the merge is launched before the pass it follows has ended (programmatic dependent launch)."""
        return self.planner.capability >= (9, 0)

    @property
    def read_strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2])

    @property
    def write_strides(self) -> tuple[int, ...]:
        return (*self.out.stride()[:2], *(self.lse.stride() if self.lse is not None else (0, 0)))

    def prefix(self, passes: Pass) -> None:
        launch = self._prefix_hopper if self._hopper_reason() is None else self._prefix_portable
        if Pass.DENSE in passes:
            launch("dense", contiguous=True)
        if Pass.GATHER in passes:
            launch("gather", contiguous=False)

    def _hopper_reason(self) -> str | None:
        if self.planner.hopper_reason is not None:
            return self.planner.hopper_reason
        if self.soft_cap > 0.0:
            return f"soft cap {self.soft_cap} is served by the portable kernel"
        tensors = (self.q, self.k, self.v)
        strides = tuple(tensor.stride() for tensor in tensors)
        return limits.hopper_layout_reason(tuple(self.k.shape), strides, tuple(t.data_ptr() for t in tensors))

    def _prefix_hopper(self, name: str, *, contiguous: bool) -> None:
        from prefixonce.hopper import launch_prefix  # only where wgmma exists

        planner, words = self.planner, self.planner.prefix_words
        launch_prefix(
            self.q,
            self.k,
            self.v,
            (planner.part_out, planner.part_lse),
            words["group_rows"],
            words[f"{name}_items"],
            None if contiguous else planner.indices,
            num_ctas=planner.geometry.num_ctas,
            gqa_group=planner.geometry.gqa_group,
            item_width=PREFIX_ITEM_WIDTH,
            scale_log2=self.scale_log2,
            v_scale=self.v_scale,
        )

    def _prefix_portable(self, name: str, *, contiguous: bool) -> None:
        planner = self.planner
        words, geometry = planner.prefix_words, planner.geometry
        head_dim = planner.spec.head_dim
        prefix_kernel[(geometry.num_ctas,)](
            self.q, self.k, self.v, planner.part_out, planner.part_lse,
            words["group_rows"], words[f"{name}_items"], planner.indices,
            *self.read_strides, self.scale_log2, self.soft_cap, self.v_scale,
            GQA=geometry.gqa_group, HEAD_DIM=head_dim, TILE=geometry.tile_rows,
            BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_N=64 if head_dim <= 128 else 32,
            CONTIGUOUS=contiguous, HAS_CAP=self.soft_cap > 0.0, ITEM_WIDTH=PREFIX_ITEM_WIDTH,
            num_warps=8 if geometry.tile_rows >= 128 else 4, num_stages=3 if head_dim <= 128 else 2,
        )  # fmt: skip

    def suffix(self) -> None:
        planner = self.planner
        spec, words = planner.spec, planner.suffix_words
        paged_kernel[(planner.suffix_capacity(self.q.shape[0]) * spec.num_kv_heads,)](
            self.q, self.k, self.v, self.out, self.lse, planner.part_out, planner.part_lse,
            words["counts"], words["items"], planner.indices, planner.suffix_base,
            *self.read_strides, *self.write_strides, self.scale_log2, self.soft_cap, self.v_scale,
            KV_HEADS=spec.num_kv_heads, GQA=spec.gqa_group, HEAD_DIM=spec.head_dim,
            BLOCK_G=16, BLOCK_D=triton.next_power_of_2(spec.head_dim), BLOCK_N=128 if spec.head_dim <= 128 else 64,
            HAS_CAP=self.soft_cap > 0.0, WITH_LSE=self.lse is not None, ITEM_WIDTH=SUFFIX_ITEM_WIDTH,
            HAS_DEPENDENT=self.launches_early, num_warps=4, num_stages=2,
        )  # fmt: skip

    def merge(self) -> None:
        planner = self.planner
        spec, prefix, suffix = planner.spec, planner.prefix_words, planner.suffix_words
        batch, block_d = self.q.shape[0], triton.next_power_of_2(spec.head_dim)
        # Few rows are spread over more, smaller programs, and mean more splits; no bit of a result depends on either.
        is_large = batch * spec.num_q_heads >= _LARGE_MERGE_ROWS
        block_h = 1024 // block_d if is_large else 1
        merge_step_kernel[(batch, triton.cdiv(spec.num_q_heads, block_h))](
            self.out, self.lse, planner.part_out, planner.part_lse,
            prefix["row_first"], prefix["row_sources"], prefix["row_stride"], suffix["indptr"],
            *self.write_strides, planner.suffix_base, spec.num_q_heads,
            GQA=spec.gqa_group, HEAD_DIM=spec.head_dim, BLOCK_H=block_h, BLOCK_D=block_d, UNROLL=2 if is_large else 8,
            WITH_LSE=self.lse is not None, DEPENDENT=self.launches_early,
            num_warps=4 if is_large else 1, launch_pdl=self.launches_early,
        )  # fmt: skip


def _check(
    planner: StepPlanner, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
) -> None:
    spec = planner.spec
    if q.shape[1:] != (spec.num_q_heads, spec.head_dim) or out.shape != q.shape or q.shape[0] > planner.max_batch:
        raise LayoutError(
            f"q is {list(q.shape)} and out {list(out.shape)}; both must be "
            f"[batch up to {planner.max_batch}, {spec.num_q_heads}, {spec.head_dim}]"
        )
    dtypes = (str(q.dtype), str(out.dtype), str(k.dtype), str(v.dtype))
    planned = tuple(f"torch.{name}" for name in (spec.q_dtype, spec.q_dtype, spec.kv_dtype, spec.kv_dtype))
    if dtypes != planned:
        raise LayoutError(f"dtypes of (q, out, k, v) are {dtypes}, planned {planned}")
    if q.stride(2) != 1 or out.stride(2) != 1:
        raise LayoutError(f"head_dim has stride {q.stride(2)} in q and {out.stride(2)} in out; it must be 1")
    reason = limits.layout_reason(tuple(k.shape), tuple(v.shape), k.stride(), v.stride(), spec)
    if reason is not None:
        raise LayoutError(reason)
    if not scale > 0.0:
        raise LayoutError(f"scale x k_scale is {scale}; it must be positive")
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != q.shape[:2]):
        raise LayoutError(f"lse is {lse.dtype} {list(lse.shape)}; it must be float32 {list(q.shape[:2])}")
