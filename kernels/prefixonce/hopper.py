"""The shared prefix on Hopper in Gluon: wgmma fed by a producer warp group, from contiguous runs (TMA) or slot lists.

Per thread block two consumer warp groups of 64 query rows and one producer; K and V pass through rings of shared
memory blocks guarded by full/empty barriers. A consumer issues QK of block i and then PV of block i - 1, and starts
the softmax of block i when QK is done (the schedule of FlashAttention-3, Shah et al. 2024). Blocks are read last to
first, so only the first one needs a mask; it is moved back to end with the keys, so nothing outside the run is read.

ptxas places the wait for PV inside the row maximum. Holding it back until all weights exist (by a barrier that depends
on them) was measured slower on an H200: 2% for runs, 18% through slots. The other consumer fills the gap.
"""

# Triton compiles the kernels from their source and types them itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

BLOCK_N = 128  # keys; the plan's `block_tokens`
_STAGES = 2
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _first_item(items, WIDTH: gl.constexpr):
    return gl.load(items + gl.program_id(0) * WIDTH + 7)


@gluon.jit
def _item(items, index, WIDTH: gl.constexpr):
    """First member, rows, head, first key, keys and first partial row of an item, and the index of the next one."""
    item = items + index * WIDTH
    return (
        gl.load(item),
        gl.load(item + 1),
        gl.load(item + 2),
        gl.load(item + 3),
        gl.load(item + 4),
        gl.load(item + 5),
        gl.load(item + 6),
    )


@gluon.jit
def _block_start(block, num_blocks, length, N: gl.constexpr):
    """First key of the block that is read `block`-th. The first one ends with the keys and may start before them."""
    return gl.where(block == 0, length - N, (num_blocks - 1 - block) * N)


@gluon.jit
def _produce_runs(k_desc, v_desc, stride_kh, stride_vh, items, rings, WIDTH: gl.constexpr):
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    N: gl.constexpr = k_ring.shape[1]
    STAGES: gl.constexpr = k_ring.shape[0]
    done = 0
    index = _first_item(items, WIDTH)
    while index >= 0:
        _, _, head, first, length, _, index = _item(items, index, WIDTH)
        num_blocks = (length + N - 1) // N
        for block in range(num_blocks):
            row = first + _block_start(block, num_blocks, length, N)
            stage = done % STAGES
            phase = (done // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [row, head * stride_kh], k_full.index(stage), k_ring.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [row, head * stride_vh], v_full.index(stage), v_ring.index(stage))
            done += 1


@gluon.jit
def _block_slots(indices, first, block, num_blocks, length, keys, N: gl.constexpr):
    """Slots of a block; keys before the run are replaced by its first one and masked by the consumers."""
    position = _block_start(block, num_blocks, length, N) + keys
    return gl.load(indices + first + gl.minimum(gl.maximum(position, 0), length - 1))


@gluon.jit
def _copy_block(ring_block, pool, stride, slot_block, layout: gl.constexpr):
    rows = pool + slot_block.load(gl.SliceLayout(1, layout)).to(gl.int64) * stride
    dims = gl.arange(0, ring_block.shape[1], gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(ring_block, rows[:, None] + dims[None, :])


@gluon.jit
def _produce_slots(k, v, indices, strides, items, slot_ring, rings, WIDTH: gl.constexpr):
    stride_ks, stride_kh, stride_vs, stride_vh = strides
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    N: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    keys = gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))
    done = 0
    index = _first_item(items, WIDTH)
    while index >= 0:
        _, _, head, first, length, _, index = _item(items, index, WIDTH)
        num_blocks = (length + N - 1) // N
        k_head = k + head.to(gl.int64) * stride_kh
        v_head = v + head.to(gl.int64) * stride_vh
        slots = _block_slots(indices, first, 0, num_blocks, length, keys, N)
        for block in range(num_blocks):
            stage = done % STAGES
            phase = (done // STAGES & 1) ^ 1
            slot_block = slot_ring.index(done & 1)
            slot_block.store(slots)
            # The next block's slots travel while this block's copies are issued.
            slots = _block_slots(indices, first, block + 1, num_blocks, length, keys, N)
            mbarrier.wait(k_empty.index(stage), phase)
            _copy_block(k_ring.index(stage), k_head, stride_ks, slot_block, layout)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            _copy_block(v_ring.index(stage), v_head, stride_vs, slot_block, layout)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            done += 1


@gluon.jit
def _partial_sums(weights, M: gl.constexpr, N: gl.constexpr):
    """[M, N] -> [M, 8] by adding what one thread already holds: no exchange between threads in the loop."""
    return gl.sum(gl.reshape(weights, [M, N // 8, 8]), axis=1)


@gluon.jit
def _consume(
    half, q_half, rings, queries, partials, items, scale_log2, v_scale,
    GQA: gl.constexpr, GATHER: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    q, group_rows, stride_qb, stride_qh = queries
    part_out, part_lse = partials
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = rings
    M: gl.constexpr = q_half.shape[0]
    D: gl.constexpr = q_half.shape[1]
    N: gl.constexpr = k_ring.shape[1]
    STAGES: gl.constexpr = k_ring.shape[0]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    query_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])

    query_rows = half * M + gl.arange(0, M, gl.SliceLayout(1, query_layout))
    query_dims = gl.arange(0, D, gl.SliceLayout(0, query_layout))
    out_rows = half * M + gl.arange(0, M, gl.SliceLayout(1, out_layout))
    out_dims = gl.arange(0, D, gl.SliceLayout(0, out_layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, score_layout))
    no_scores = gl.zeros([M, N], gl.float32, score_layout)
    done = 0
    index = _first_item(items, WIDTH)
    while index >= 0:
        first_member, num_rows, head, _, length, first_row, index = _item(items, index, WIDTH)
        num_blocks = (length + N - 1) // N
        row_mask = query_rows < num_rows
        batch_rows = gl.load(group_rows + first_member + query_rows // GQA, row_mask, other=0).to(gl.int64)
        offsets = batch_rows * stride_qb + (head * GQA + query_rows % GQA).to(gl.int64) * stride_qh
        q_half.store(gl.load(q + offsets[:, None] + query_dims[None, :], row_mask[:, None], other=0.0))
        fence_async_shared()

        stage = done % STAGES
        phase = done // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        if GATHER:
            fence_async_shared()
        scores = warpgroup_mma(q_half, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = gl.where((columns >= num_blocks * N - length)[None, :], scores, float("-inf"))
        peak = gl.max(scores, axis=1)
        weights = gl.exp2(scores * scale_log2 - (peak * scale_log2)[:, None])
        sums = _partial_sums(weights, M, N)
        acc = gl.zeros([M, D], gl.float32, out_layout)
        weights_16 = gl.convert_layout(weights.to(q.dtype.element_ty), weight_layout)

        for _block in range(1, num_blocks):
            v_stage = stage
            v_phase = phase
            done += 1
            stage = done % STAGES
            phase = done // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            if GATHER:
                fence_async_shared()
            scores = warpgroup_mma(q_half, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            if GATHER:
                fence_async_shared()
            acc = warpgroup_mma(weights_16, v_ring.index(v_stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            new_peak = gl.maximum(peak, gl.max(scores, axis=1))
            fade = gl.exp2((peak - new_peak) * scale_log2)
            weights = gl.exp2(scores * scale_log2 - (new_peak * scale_log2)[:, None])
            block_sums = _partial_sums(weights, M, N)
            sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None] + block_sums
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, out_layout))[:, None]
            weights_16 = gl.convert_layout(weights.to(q.dtype.element_ty), weight_layout)
            peak = new_peak

        mbarrier.wait(v_full.index(stage), phase)
        if GATHER:
            fence_async_shared()
        acc = warpgroup_mma(weights_16, v_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        done += 1

        total = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, out_layout))
        peak = gl.convert_layout(peak, gl.SliceLayout(1, out_layout))
        out_mask = out_rows < num_rows
        rows = first_row + out_rows
        target = part_out + rows.to(gl.int64)[:, None] * D + out_dims[None, :]
        gl.store(target, acc * (v_scale / total)[:, None], out_mask[:, None])
        gl.store(part_lse + rows, (peak * scale_log2 + gl.log2(total)) * 0.6931471805599453, out_mask)


@gluon.jit
def _prefix_kernel(
    q, k, v, k_desc, v_desc, part_out, part_lse, group_rows, items, indices,
    stride_qb, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, scale_log2, v_scale,
    GQA: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [2, 64, D], k_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A copy through slots is announced by each of the 128 threads that made it, a TMA copy once.
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128 if GATHER else 1)
        mbarrier.init(v_full.index(stage), count=128 if GATHER else 1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gdc_launch_dependents()  # the merge may read its plan while this runs
    rings = (k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    queries = (q, group_rows, stride_qb, stride_qh)
    partials = (part_out, part_lse)
    first = (0, q_tile.index(0), rings, queries, partials, items, scale_log2, v_scale, GQA, GATHER, WIDTH)
    second = (1, q_tile.index(1), rings, queries, partials, items, scale_log2, v_scale, GQA, GATHER, WIDTH)
    if GATHER:
        strides = (stride_ks, stride_kh, stride_vs, stride_vh)
        slot_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        slot_ring = gl.allocate_shared_memory(gl.int32, [2, N], slot_layout)
        slots = (k, v, indices, strides, items, slot_ring, rings, WIDTH)
        gl.warp_specialize([(_consume, first), (_consume, second), (_produce_slots, slots)], [4, 4], [232, 40])
    else:
        runs = (k_desc, v_desc, stride_kh, stride_vh, items, rings, WIDTH)
        gl.warp_specialize([(_consume, first), (_consume, second), (_produce_runs, runs)], [4, 1], [240, 24])


def launch_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    partials: tuple[Tensor, Tensor],
    group_rows: Tensor,
    items: Tensor,
    indices: Tensor | None,
    *,
    num_ctas: int,
    gqa_group: int,
    item_width: int,
    scale_log2: float,
    v_scale: float,
) -> None:
    """One launch over the words of an `ItemList`: from contiguous runs, or through slot lists if `indices` is given."""
    _prefix_kernel[(num_ctas,)](
        q, k, v, _descriptor(k), _descriptor(v), *partials, group_rows, items, indices,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale_log2, v_scale,
        GQA=gqa_group, GATHER=indices is not None, STAGES=_STAGES, WIDTH=item_width, num_warps=4,
    )  # fmt: skip


def _descriptor(pool: Tensor) -> TensorDescriptor:
    """A pool [slots, heads, head_dim] as rows of slots, in which a head is an offset along the row."""
    slots, heads, head_dim = pool.shape
    width = (heads - 1) * pool.stride(1) + head_dim
    block = [BLOCK_N, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[pool.dtype])
    return TensorDescriptor(pool, [slots, width], [pool.stride(0), 1], block, layout)
