"""FlashInfer's decode, cascade, single and paged prefill, planned beforehand. Its LSE is base 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from prefixbench.measures.kernel.implementation import Implementation, Prepared, Result
from prefixbench.measures.kernel.inputs import Inputs, Shape
from prefixonce import Path

_WORKSPACE_BYTES = 512 << 20
_BACKENDS = ("fa2", "fa3")


def implementations() -> tuple[Implementation, ...]:
    whole = partial(_unsupported_prefix, "fa2", "prefix and suffix")
    found = [
        Implementation("flashinfer-decode", Path.STOCK, _unsupported_decode, _decode),
        Implementation("flashinfer-cascade-decode", Path.CASCADE, whole, _cascade_decode),
    ]
    for backend in _BACKENDS:
        found += [
            Implementation(
                f"flashinfer-{kind}-{backend}",
                Path.CASCADE,
                partial(_unsupported_prefix, backend, needs),
                partial(prepare, backend),
            )
            for kind, needs, prepare in (
                ("single", "contiguous prefix alone", _single),
                ("paged", "prefix alone", _paged),
                ("cascade", "prefix and suffix", _cascade),
            )
        ]
    return tuple(found)


def _unsupported_decode(_: Shape, device: torch.device) -> str | None:
    return _missing(device)


def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


def _unsupported_prefix(backend: str, needs: str, shape: Shape, device: torch.device) -> str | None:
    has = "prefix and suffix" if shape.prefix_tokens and shape.suffix_tokens else "prefix alone"
    if shape.layout == "unique" or not shape.prefix_tokens:
        return "there is no shared prefix"
    if not needs.endswith(has) or (needs.startswith("contiguous") and shape.layout != "shared-contiguous"):
        return f"it serves a {needs}"
    missing = _missing(device)
    if missing is None and backend == "fa3" and torch.cuda.get_device_capability(device)[0] != 9:
        return "fa3 needs a Hopper GPU"
    return missing


def _decode(inputs: Inputs) -> Prepared:
    """Every request reads its own pages, prefix included (through the L2 where pages are shared)."""
    tokens = inputs.shape.prefix_tokens + inputs.shape.suffix_tokens
    run = _own_keys(inputs, inputs.row_slots, tokens)
    return Prepared(run, _as_result, {"backend": "fa2, tensor cores"})


def _own_keys(inputs: Inputs, slots: Tensor, tokens: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    import flashinfer

    shape, page = inputs.shape, inputs.shape.page_size
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(inputs), "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_ragged(_pages(slots, page), tokens, page),
        *(shape.q_heads, shape.kv_heads, shape.head_dim, page),
        q_data_type=inputs.q[0].dtype,
        kv_data_type=inputs.k[0].dtype,
        sm_scale=inputs.scale,
    )

    def run(i: int) -> tuple[Tensor, Tensor]:
        out, lse = wrapper.run(inputs.q[i], _cache(inputs, i), return_lse=True)
        return out, lse

    return run


def _single(backend: str, inputs: Inputs) -> Prepared:
    """The batch's queries as one request of `batch` tokens over a contiguous prefix."""
    import flashinfer

    start = int(inputs.prefix_slots[0, 0])
    prefix = slice(start, start + inputs.shape.prefix_tokens)

    def run(i: int) -> object:
        return flashinfer.single_prefill_with_kv_cache(
            inputs.q[i],
            inputs.k[i][prefix],
            inputs.v[i][prefix],
            causal=False,
            kv_layout="NHD",
            sm_scale=inputs.scale,
            backend=backend,
            return_lse=True,
        )

    return Prepared(run, _as_result, {"backend": backend})


def _paged(backend: str, inputs: Inputs) -> Prepared:
    """The same over the prefix's pages."""
    prefix = _prefix_pass(backend, inputs, _workspace(inputs))
    return Prepared(prefix, _as_result, {"backend": backend})


def _cascade(backend: str, inputs: Inputs) -> Prepared:
    """Two levels and a merge: what `MultiLevelCascadeAttentionWrapper` runs, with the backend chosen."""
    shape, page = inputs.shape, inputs.shape.page_size
    workspace = _workspace(inputs)
    prefix = _prefix_pass(backend, inputs, workspace)
    rows = torch.arange(shape.batch + 1, dtype=torch.int32, device=inputs.device)
    suffix_pages = _pages(inputs.suffix_slots, page)
    suffix = _prefill(backend, inputs, workspace, rows, _ragged(suffix_pages, shape.suffix_tokens, page))
    return Prepared(_merged(suffix, prefix), _as_result, {"backend": backend})


def _cascade_decode(inputs: Inputs) -> Prepared:
    """The quickest that FlashInfer's parts can be put together: its decode kernel for the suffixes, and a merge."""
    prefix = _prefix_pass("fa2", inputs, _workspace(inputs))
    suffix = _own_keys(inputs, inputs.suffix_slots, inputs.shape.suffix_tokens)
    return Prepared(_merged(suffix, prefix), _as_result, {"backend": "fa2, suffix by decode"})


def _merged(
    suffix: Callable[[int], tuple[Tensor, Tensor]], prefix: Callable[[int], tuple[Tensor, Tensor]]
) -> Callable[[int], tuple[Tensor, Tensor]]:
    import flashinfer

    def run(i: int) -> tuple[Tensor, Tensor]:
        out, lse = suffix(i)
        flashinfer.merge_state_in_place(out, lse, *prefix(i))
        return out, lse

    return run


def _prefix_pass(backend: str, inputs: Inputs, workspace: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    shape, page = inputs.shape, inputs.shape.page_size
    queries = torch.tensor([0, shape.batch], dtype=torch.int32, device=inputs.device)
    pages = _pages(inputs.prefix_slots, page)
    return _prefill(backend, inputs, workspace, queries, _ragged(pages, shape.prefix_tokens, page))


def _prefill(
    backend: str, inputs: Inputs, workspace: Tensor, queries: Tensor, keys: tuple[Tensor, Tensor, Tensor]
) -> Callable[[int], tuple[Tensor, Tensor]]:
    import flashinfer

    shape = inputs.shape
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        queries,
        *keys,
        *(shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size),
        causal=False,
        q_data_type=inputs.q[0].dtype,
        kv_data_type=inputs.k[0].dtype,
        sm_scale=inputs.scale,
    )

    def run(i: int) -> tuple[Tensor, Tensor]:
        out, lse = wrapper.run(inputs.q[i], _cache(inputs, i), return_lse=True)
        return out, lse

    return run


def _workspace(inputs: Inputs) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)


def _cache(inputs: Inputs, i: int) -> tuple[Tensor, Tensor]:
    page = inputs.shape.page_size
    k, v = inputs.k[i], inputs.v[i]
    return k.view(-1, page, *k.shape[1:]), v.view(-1, page, *v.shape[1:])


def _pages(slots: Tensor, page_size: int) -> Tensor:
    """int32 [rows, pages]: the page of every `page_size`-th slot."""
    return (slots[:, ::page_size] // page_size).to(torch.int32)


def _ragged(pages: Tensor, tokens: int, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's (indptr, indices, last_page_len) of rows that all have `tokens` tokens."""
    rows, each = pages.shape
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=pages.device) * each
    last = torch.full((rows,), (tokens - 1) % page_size + 1, dtype=torch.int32, device=pages.device)
    return indptr, pages.flatten(), last


def _as_result(ran: Any) -> Result:
    out, lse_base2 = ran
    return Result(out, lse_base2 * math.log(2))
