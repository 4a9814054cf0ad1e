"""The shared prefix read once per group, portable Triton: through slot lists (cascade) or from contiguous runs (dense).

All queries of a group meet one KV head in tiles of `TILE` rows (Hydragen, Juravsky et al. 2024); the keys are split
over thread blocks, each of which writes an fp32 partial with its natural-log LSE.
"""

# Triton compiles the kernels from their source and types them itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from prefixonce.paged import attend_block


@triton.jit
def prefix_kernel(
    q, k, v, part_out, part_lse,
    group_rows, items, indices,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    scale_log2, soft_cap, v_scale,
    GQA: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CONTIGUOUS: tl.constexpr, HAS_CAP: tl.constexpr, ITEM_WIDTH: tl.constexpr,
):  # fmt: skip
    """One thread block of the plan, item after item. Tile row m is query head m % GQA of member m // GQA."""
    cta = tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    tile_rows = tl.arange(0, TILE)
    lane = tl.arange(0, BLOCK_N)
    index = tl.load(items + cta * ITEM_WIDTH + 7)
    while index >= 0:
        item = items + index * ITEM_WIDTH
        first_member = tl.load(item)
        num_rows = tl.load(item + 1)
        head = tl.load(item + 2).to(tl.int64)
        first = tl.load(item + 3)
        length = tl.load(item + 4)
        first_row = tl.load(item + 5).to(tl.int64)
        index = tl.load(item + 6)

        row_mask = tile_rows < num_rows
        mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        batch_rows = tl.load(group_rows + first_member + tile_rows // GQA, row_mask, other=0).to(tl.int64)
        query_offsets = batch_rows * stride_qb + (head * GQA + tile_rows % GQA) * stride_qh
        query = tl.load(q + query_offsets[:, None] + dims[None, :], mask, other=0.0)
        k_head = k + head * stride_kh
        v_head = v + head * stride_vh
        acc = tl.zeros([TILE, BLOCK_D], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        # One block ahead: addresses that wait for nothing let the compiler keep several blocks of K/V in flight.
        slots = first + lane if CONTIGUOUS else tl.load(indices + first + lane, lane < length, other=0)
        for begin in range(0, length, BLOCK_N):
            valid = begin + lane < length
            k_mask = valid[None, :] if BLOCK_D == HEAD_DIM else valid[None, :] & (dims < HEAD_DIM)[:, None]
            v_mask = valid[:, None] if BLOCK_D == HEAD_DIM else valid[:, None] & (dims < HEAD_DIM)[None, :]
            k_rows = k_head + slots.to(tl.int64) * stride_ks
            v_rows = v_head + slots.to(tl.int64) * stride_vs
            k_t = tl.load(k_rows[None, :] + dims[:, None], k_mask, other=0.0)
            values = tl.load(v_rows[:, None] + dims[None, :], v_mask, other=0.0)
            following = begin + BLOCK_N + lane
            if CONTIGUOUS:
                slots = first + following
            else:
                slots = tl.load(indices + first + following, following < length, other=0)
            acc, total, peak = attend_block(
                acc, total, peak, query, k_t.to(query.dtype), values.to(query.dtype), valid,
                scale_log2, soft_cap, HAS_CAP,
            )  # fmt: skip
        rows = first_row + tile_rows
        tl.store(part_out + rows[:, None] * HEAD_DIM + dims[None, :], acc * (v_scale / total)[:, None], mask)
        tl.store(part_lse + rows, (peak + tl.log2(total)) * 0.6931471805599453, row_mask)
