"""LSE merge in Triton: fp32 partials and natural-log LSE in, output dtype out (online softmax, Milakov 2018).

A piece that is handed in with lse -inf has weight exactly zero whatever its `out` holds, NaN included; the passes of a
step write no such piece. If every piece is empty the result is out 0 and lse -inf. Sources are added in a fixed order,
so the same partials give the same bits.
"""

# Triton compiles the kernels from their source and types them itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment, unreachable"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from prefixonce.errors import LayoutError


@triton.jit
def add_source(acc, denominator, peak, out, lse):
    """Adds one source [rows, head_dim] with lse [rows] to the running sum, all fp32."""
    new_peak = tl.maximum(peak, lse)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old_weight = tl.exp(peak - base)
    weight = tl.exp(lse - base)
    contribution = tl.where(weight[:, None] == 0.0, 0.0, out * weight[:, None])
    return acc * old_weight[:, None] + contribution, denominator * old_weight + weight, new_peak


@triton.jit
def finish(acc, denominator, peak):
    """(out, lse) of the running sum; an empty sum is (0, -inf)."""
    empty = denominator == 0.0
    safe = tl.where(empty, 1.0, denominator)
    return acc / safe[:, None], tl.where(empty, float("-inf"), peak + tl.log(safe))


@triton.jit
def _merge_pieces_kernel(
    outs, lses, merged, merged_lse,
    stride_op, stride_ob, stride_oh, stride_od,
    stride_lp, stride_lb, stride_lh,
    stride_mb, stride_mh, stride_md, stride_nb, stride_nh,
    num_pieces, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    head_mask = heads < num_heads
    mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for piece in range(num_pieces):
        lse = tl.load(lses + piece * stride_lp + row * stride_lb + heads * stride_lh, head_mask, other=float("-inf"))
        offsets = piece * stride_op + row * stride_ob + heads[:, None] * stride_oh + dims[None, :] * stride_od
        out = tl.load(outs + offsets, mask, other=0.0).to(tl.float32)
        acc, denominator, peak = add_source(acc, denominator, peak, out, lse.to(tl.float32))
    out, lse = finish(acc, denominator, peak)
    target = merged + row * stride_mb + heads[:, None] * stride_mh + dims[None, :] * stride_md
    tl.store(target, out.to(merged.dtype.element_ty), mask)
    tl.store(merged_lse + row * stride_nb + heads * stride_nh, lse, head_mask)


def merge_pieces(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges `outs` [pieces, rows, heads, head_dim] with `lses` [pieces, rows, heads] into `out` and `lse`.

    Any strides. `lses` and `lse` are fp32 natural logs: another dtype is refused, never cast.
    """
    if lses.dtype != torch.float32 or lse.dtype != torch.float32:
        raise LayoutError(f"lse is {lses.dtype} in and {lse.dtype} out; both must be torch.float32 (natural log)")
    if outs.shape[:3] != lses.shape or outs.shape[1:] != out.shape or out.shape[:2] != lse.shape:
        raise LayoutError(f"shapes {list(outs.shape)}, {list(lses.shape)} do not merge into {list(out.shape)}")
    pieces, rows, heads, head_dim = outs.shape
    block_h = min(8, triton.next_power_of_2(heads))
    _merge_pieces_kernel[(rows, triton.cdiv(heads, block_h))](
        outs, lses, out, lse, *outs.stride(), *lses.stride(), *out.stride(), *lse.stride(), pieces, heads,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_H=block_h,
    )  # fmt: skip


@triton.jit
def _load_sources(part_out, part_lse, plan, first, dims, HEAD_DIM: tl.constexpr, UNROLL: tl.constexpr):
    """(outs, lses) of the sources `first .. first + UNROLL` of every head, their loads in flight together.

    First come the partials of the tile, then those of the suffix; past the last one out is 0 and lse -inf.
    """
    first_prefix, num_prefix, stride_prefix, first_suffix, stride_suffix, num_sources = plan
    outs = ()
    lses = ()
    for i in tl.static_range(UNROLL):
        index = first + i
        prefix_rows = first_prefix + index * stride_prefix
        suffix_rows = first_suffix + (index - num_prefix) * stride_suffix
        rows = tl.where(index < num_prefix, prefix_rows, suffix_rows)
        mask = index < num_sources
        lses += (tl.load(part_lse + rows, mask, other=float("-inf")),)
        offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        outs += (tl.load(part_out + offsets, mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0),)
    return outs, lses


@triton.jit
def _add_sources(acc, denominator, base, outs, lses, UNROLL: tl.constexpr):
    for i in tl.static_range(UNROLL):
        weight = tl.exp(lses[i] - base)
        acc += outs[i] * weight[:, None]
        denominator += weight
    return acc, denominator


@triton.jit
def merge_step_kernel(
    out, out_lse, part_out, part_lse,
    row_first, row_sources, row_stride, suffix_indptr,
    stride_ob, stride_oh, stride_lb, stride_lh,
    suffix_base, num_q_heads,
    GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    WITH_LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`BLOCK_H` query heads of one row: the partials of their tile, then those of the row's suffix, in that order.

    The largest LSE of all sources is known before the first is added, so `UNROLL` does not change a bit of the result.
    A dependent launch reads the plan while the kernel before it still runs.
    """
    row = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_q_heads
    unit = row * (num_q_heads // GQA) + heads // GQA
    num_prefix = tl.load(row_sources + unit, head_mask, other=0)
    first_prefix = tl.load(row_first + unit, head_mask, other=0) + heads % GQA
    suffix_begin = tl.load(suffix_indptr + row)
    num_suffix = tl.load(suffix_indptr + row + 1) - suffix_begin
    first_suffix = suffix_base + suffix_begin * num_q_heads + heads
    num_sources = tl.where(head_mask, num_prefix + num_suffix, 0)
    plan = (first_prefix, num_prefix, tl.load(row_stride + row), first_suffix, num_q_heads, num_sources)
    most = tl.max(num_prefix) + num_suffix
    if DEPENDENT:
        gdc_wait()
    if (most == 1) & (num_suffix == 1):
        return  # the suffix kernel wrote this row itself

    dims = tl.arange(0, BLOCK_D)
    outs, lses = _load_sources(part_out, part_lse, plan, 0, dims, HEAD_DIM, UNROLL)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for i in tl.static_range(UNROLL):
        peak = tl.maximum(peak, lses[i])
    for first in range(UNROLL, most, UNROLL):
        _, more = _load_sources(part_out, part_lse, plan, first, dims, HEAD_DIM, UNROLL)
        for i in tl.static_range(UNROLL):
            peak = tl.maximum(peak, more[i])
    base = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc, denominator = _add_sources(acc, denominator, base, outs, lses, UNROLL)
    for first in range(UNROLL, most, UNROLL):
        outs, lses = _load_sources(part_out, part_lse, plan, first, dims, HEAD_DIM, UNROLL)
        acc, denominator = _add_sources(acc, denominator, base, outs, lses, UNROLL)
    result, lse = finish(acc, denominator, peak)
    target = out + row.to(tl.int64) * stride_ob + heads[:, None] * stride_oh + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), head_mask[:, None] & (dims < HEAD_DIM)[None, :])
    if WITH_LSE:
        tl.store(out_lse + row.to(tl.int64) * stride_lb + heads * stride_lh, lse, head_mask)
