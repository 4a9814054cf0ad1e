"""torch's cuDNN and flash attention over a contiguous shared prefix: plain, and split by hand over the batch axis.

All queries of a KV head are packed beforehand, untimed; their LSE is natural.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from prefixbench.measures.kernel.implementation import Implementation, Prepared, Result
from prefixbench.measures.kernel.inputs import DTYPES, Inputs, Shape
from prefixbench.measures.kernel.timing import GraphClock
from prefixonce import Path

Attention = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

_SPLITS = (1, 2, 4, 8, 16)
_LEAST_SPLIT_TOKENS = 128


def implementations() -> tuple[Implementation, ...]:
    """`cudnn-split-unmerged` leaves its partials unmerged in the timed part: the least that any split can take."""
    return tuple(
        Implementation(name, Path.CASCADE, _unsupported, prepare, compiles=False)
        for name, prepare in (
            ("cudnn", partial(_plain, _cudnn)),
            ("cudnn-split", partial(_split, True)),
            ("cudnn-split-unmerged", partial(_split, False)),
            ("torch-flash", partial(_plain, _flash)),
        )
    )


def _unsupported(shape: Shape, device: torch.device) -> str | None:
    if shape.layout != "shared-contiguous" or not shape.prefix_tokens or shape.suffix_tokens:
        return "it serves a contiguous prefix alone"
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    return None


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse.view(out.shape[:3])


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse[:, :, : out.shape[2]]


def _plain(attention: Attention, inputs: Inputs) -> Prepared:
    calls = [_arguments(inputs, i, 1) for i in range(len(inputs.q))]

    def run(i: int) -> object:
        return attention(*calls[i], inputs.scale)

    return Prepared(run, partial(_merged_result, inputs.shape))


def _split(is_merged: bool, inputs: Inputs) -> Prepared:
    """The number of splits is the fastest of a few, found here."""
    tokens = inputs.shape.prefix_tokens
    allowed = [n for n in _SPLITS if n == 1 or (tokens % n == 0 and tokens // n >= _LEAST_SPLIT_TOKENS)]
    best = min(allowed, key=partial(_trial_us, inputs))
    calls = [_arguments(inputs, i, best) for i in range(len(inputs.q))]

    def run(i: int) -> object:
        out, lse = _cudnn(*calls[i], inputs.scale)
        return _merge(out, lse) if is_merged else (out, lse)

    return Prepared(run, partial(_merged_result, inputs.shape), {"splits": best, "merge_timed": is_merged})


def _trial_us(inputs: Inputs, splits: int) -> float:
    clock = GraphClock()
    call = _arguments(inputs, 0, splits)
    replay = clock.record(lambda _: _cudnn(*call, inputs.scale), (0,) * 5)
    replay()
    readings = [clock.time_us(replay) for _ in range(5)]
    clock.settle()
    return statistics.median(read() for read in readings)


def _arguments(inputs: Inputs, i: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [splits, kv_heads, batch x group, head_dim]; k and v [splits, kv_heads, tokens / splits, head_dim], views."""
    shape = inputs.shape
    group = shape.q_heads // shape.kv_heads
    q = inputs.q[i].view(shape.batch, shape.kv_heads, group, shape.head_dim).transpose(0, 1)
    q = q.reshape(1, shape.kv_heads, shape.batch * group, shape.head_dim).repeat(splits, 1, 1, 1)
    start = int(inputs.prefix_slots[0, 0])

    def pieces(pool: Tensor) -> Tensor:
        run = pool[start : start + shape.prefix_tokens]
        return run.view(splits, -1, shape.kv_heads, shape.head_dim).transpose(1, 2)

    return q, pieces(inputs.k[i]), pieces(inputs.v[i])


def _merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(lse, dim=0).unsqueeze(-1)
    return (out * weights).sum(dim=0, keepdim=True), torch.logsumexp(lse, dim=0, keepdim=True)


def _merged_result(shape: Shape, ran: object) -> Result:
    """Undoes the packing; merges what the timed part left unmerged."""
    assert isinstance(ran, tuple)
    out, lse = _merge(*ran)
    group = shape.q_heads // shape.kv_heads
    out = out.view(shape.kv_heads, shape.batch, group, shape.head_dim).transpose(0, 1)
    lse = lse.reshape(shape.kv_heads, shape.batch, group).transpose(0, 1)
    out = out.reshape(shape.batch, shape.q_heads, shape.head_dim).to(DTYPES[shape.dtype])
    return Result(out, lse.reshape(shape.batch, shape.q_heads))
