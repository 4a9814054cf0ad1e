"""Split-KV decode over slots in Triton: every row reads its own K/V. The paged baseline and the suffix pass."""

# Triton compiles the kernels from their source and types them itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def scores_log2(dot, scale_log2, soft_cap, HAS_CAP: tl.constexpr):
    """Scaled scores in units of log2, so that weights are exp2; `scale_log2` is scale x k_scale x log2(e)."""
    if HAS_CAP:
        log2e: tl.constexpr = 1.4426950408889634
        # tanh through exp: 1 at +inf and -1 at -inf without overflow
        scaled = dot * (scale_log2 / log2e) / soft_cap
        return soft_cap * log2e * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scaled)))
    return dot * scale_log2


@triton.jit
def attend_block(acc, total, peak, q, k_t, v, valid, scale_log2, soft_cap, HAS_CAP: tl.constexpr):
    """One step of online softmax: q [M, D], k_t [D, N], v [N, D] in the query's dtype; `peak` in log2 units."""
    scores = scores_log2(tl.dot(q, k_t), scale_log2, soft_cap, HAS_CAP)
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
    return acc, total, new_peak


@triton.jit
def paged_kernel(
    q, k, v, out, out_lse, part_out, part_lse,
    counts, items, indices, part_base,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    stride_ob, stride_oh, stride_lb, stride_lh,
    scale_log2, soft_cap, v_scale,
    KV_HEADS: tl.constexpr, GQA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, WITH_LSE: tl.constexpr, ITEM_WIDTH: tl.constexpr, HAS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one row and one KV head; writes `out` itself when the row has no other partial."""
    item = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    if item >= tl.load(counts):
        return
    if HAS_DEPENDENT:
        gdc_launch_dependents()  # the merge may read its plan while this runs
    row = tl.load(items + item * ITEM_WIDTH).to(tl.int64)
    first = tl.load(items + item * ITEM_WIDTH + 1)
    length = tl.load(items + item * ITEM_WIDTH + 2)
    is_direct = tl.load(items + item * ITEM_WIDTH + 3)

    queries = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GQA + queries
    query_mask = queries < GQA
    mask = query_mask[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + row * stride_qb + heads[:, None] * stride_qh + dims[None, :], mask, other=0.0)
    k_head = k + head.to(tl.int64) * stride_kh
    v_head = v + head.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    lane = tl.arange(0, BLOCK_N)
    # One block ahead: addresses that wait for nothing let the compiler keep several blocks of K/V in flight.
    slots = tl.load(indices + first + lane, lane < length, other=0)
    for begin in range(0, length, BLOCK_N):
        valid = begin + lane < length
        k_mask = valid[None, :] if BLOCK_D == HEAD_DIM else valid[None, :] & (dims < HEAD_DIM)[:, None]
        v_mask = valid[:, None] if BLOCK_D == HEAD_DIM else valid[:, None] & (dims < HEAD_DIM)[None, :]
        k_rows = k_head + slots.to(tl.int64) * stride_ks
        v_rows = v_head + slots.to(tl.int64) * stride_vs
        k_t = tl.load(k_rows[None, :] + dims[:, None], k_mask, other=0.0)
        values = tl.load(v_rows[:, None] + dims[None, :], v_mask, other=0.0)
        following = begin + BLOCK_N + lane
        slots = tl.load(indices + first + following, following < length, other=0)
        acc, total, peak = attend_block(
            acc, total, peak, query, k_t.to(query.dtype), values.to(query.dtype), valid, scale_log2, soft_cap, HAS_CAP
        )
    result = acc * (v_scale / total)[:, None]
    lse = (peak + tl.log2(total)) * 0.6931471805599453
    if is_direct:
        target = out + row * stride_ob + heads[:, None] * stride_oh + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask)
        if WITH_LSE:
            tl.store(out_lse + row * stride_lb + heads * stride_lh, lse, query_mask)
    else:
        rows = part_base + item * (KV_HEADS * GQA) + heads
        tl.store(part_out + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], result, mask)
        tl.store(part_lse + rows, lse, query_mask)


@triton.jit
def snapshot_kernel(table, table_rows, copies, indices, stride_table, COPY_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Packs slot lists: positions `first .. first + tokens` of one table row to `indices[target:]`.

    Runs before a captured graph is replayed, so nothing recorded in the graph reads the table.
    """
    copy = copies + tl.program_id(0) * COPY_WIDTH
    row = tl.load(table_rows + tl.load(copy)).to(tl.int64)
    first = tl.load(copy + 1)
    tokens = tl.load(copy + 2)
    target = tl.load(copy + 3)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < tokens
    slots = tl.load(table + row * stride_table + first + offsets, valid)
    tl.store(indices + target + offsets, slots.to(tl.int32), valid)


@triton.jit(do_not_specialize=["first_copy", "steps", "batch"])
def grow_kernel(
    table, table_rows, copies, indptr, items, indices, first_copy, steps, batch, stride_table,
    COPY_WIDTH: tl.constexpr, ITEM_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes the last item of every row `steps` tokens longer than its copy was, and packs the newest one's slot.

    Runs before a captured graph is replayed, once per step since the plan; slots of the steps between are there.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = rows < batch
    copy = copies + (first_copy + rows) * COPY_WIDTH
    tokens = tl.load(copy + 2, valid, other=0) + steps
    end = tl.load(copy + 3, valid, other=0) + tokens
    position = tl.load(copy + 1, valid, other=0) + tokens - 1
    item = items + (tl.load(indptr + rows + 1, valid, other=1) - 1) * ITEM_WIDTH
    tl.store(item + 2, end - tl.load(item + 1, valid, other=0), valid)
    line = table + tl.load(table_rows + rows, valid, other=0).to(tl.int64) * stride_table
    tl.store(indices + end - 1, tl.load(line + position, valid, other=0).to(tl.int32), valid)
