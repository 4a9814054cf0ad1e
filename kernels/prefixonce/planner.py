"""Static device buffers that hold the plan of one decode step, so that a captured CUDA graph replays with another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto

import numpy as np
import torch
import triton
from torch import Tensor

from prefixonce import limits, workplan
from prefixonce.errors import LayoutError
from prefixonce.limits import HeadSpec
from prefixonce.paged import snapshot_kernel
from prefixonce.step import Choice, DecodeStep, PrefixGroup, Segment
from prefixonce.workplan import (
    COPY_WIDTH,
    MAX_SEGMENTS,
    PREFIX_ITEM_WIDTH,
    SUFFIX_ITEM_WIDTH,
    Geometry,
    IntArray,
    PrefixSize,
)

_SNAPSHOT_BLOCK = 1024
_SUFFIX_CTAS_PER_SM = 3  # enough chunks to fill the device when few rows are long


class Pass(Flag):
    """The kernels of a step. A graph records a fixed set; an update that needs another pass is refused."""

    DENSE = auto()  # prefix from contiguous runs
    GATHER = auto()  # prefix through slot lists
    SUFFIX = auto()  # what every row reads alone
    MERGE = auto()  # combines the partials of a row


@dataclass(frozen=True, slots=True)
class Overlap:
    """How prefix arithmetic and suffix traffic share the device while both run; measured on an H200.

    `run_block_us` and `slot_block_us` are one query tile against one key block on one SM beside the suffix, from a
    contiguous run or through slots; `item_us` is what an item costs besides (queries in, partial out), `cut_us` what is
    lost when shares end inside a head (the heads of a token are then read at different times), `source_us` one more
    partial to merge. The suffix pass alone moves `bytes_per_us` and keeps `suffix_sm_share` of the SMs busy.
    """

    run_block_us: float = 1.5
    slot_block_us: float = 1.85
    item_us: float = 7.0
    cut_us: float = 16.0
    source_us: float = 0.3
    bytes_per_us: float = 3.8e6
    suffix_sm_share: float = 0.68

    def prefix_ctas(self, size: PrefixSize, suffix_bytes: int, num_ctas: int) -> int:
        """Thread blocks for the prefix pass, one per SM, such that both passes are over soonest."""
        if not size.tiles or not suffix_bytes:
            return num_ctas
        step = size.tiles if size.tiles <= num_ctas else max(1, num_ctas // 8)
        return min(range(step, num_ctas + 1, step), key=lambda ctas: self._both_us(size, suffix_bytes, num_ctas, ctas))

    def _both_us(self, size: PrefixSize, suffix_bytes: int, num_ctas: int, ctas: int) -> float:
        prefix_us = math.ceil(size.run_blocks / ctas) * self.run_block_us
        prefix_us += math.ceil(size.slot_blocks / ctas) * self.slot_block_us
        prefix_us += math.ceil(size.items / ctas) * self.item_us + self.source_us * ctas / size.items
        if max(size.items, ctas) % min(size.items, ctas):
            prefix_us += self.cut_us
        suffix_us = suffix_bytes / self.bytes_per_us
        beside = min(1.0, (num_ctas - ctas) / num_ctas / self.suffix_sm_share)
        moved = prefix_us * beside / suffix_us
        return max(prefix_us, suffix_us / beside) if moved >= 1.0 else prefix_us + (1.0 - moved) * suffix_us


_PORTABLE = Overlap(run_block_us=2.5, slot_block_us=2.7)  # the plain Triton kernel, on the same GPU


class _Words:
    """Named int32 sections of one device tensor, refilled by one asynchronous copy from pinned memory."""

    _RING = 2

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._slices: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._slices[name] = slice(end, end + size)
            end += -(-size // 4) * 4
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(end, dtype=torch.int32, pin_memory=pinned) for _ in range(self._RING)]
        self._free = [torch.cuda.Event() for _ in range(self._RING)] if pinned else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._device[self._slices[name]]

    def fill(self, sections: Mapping[str, IntArray], rest: Mapping[str, int]) -> None:
        """Copies every section; `rest` is the value after the end of a section that is shorter than its room."""
        self._turn = (self._turn + 1) % self._RING
        if self._free is not None:
            self._free[self._turn].synchronize()  # the copy of two updates ago: over unless the host is far ahead
        host = self._staging[self._turn].numpy()
        for name, values in sections.items():
            room = host[self._slices[name]]
            if values.size > room.size:
                raise LayoutError(f"{name} needs {values.size} words, room for {room.size}; raise max_batch")
            room[: values.size] = values.reshape(-1)
            if name in rest:
                room[values.size :] = rest[name]
        self._device.copy_(self._staging[self._turn], non_blocking=True)
        if self._free is not None:
            self._free[self._turn].record()


class StepPlanner:
    """Owns every buffer that the kernels of a step read or write besides q, K, V and out.

    One planner serves all layers and all captured batch sizes up to `max_batch`: `update` before each step, outside
    the graph; `attend` in every layer. `max_tokens` bounds the slots packed per step (all suffixes, plus each prefix
    that is read through slots). `split_tokens` fixes where keys are cut, see `Geometry`.
    """

    def __init__(
        self,
        spec: HeadSpec,
        *,
        max_batch: int,
        max_tokens: int,
        device: torch.device | str,
        num_ctas: int | None = None,
        split_tokens: int = 0,
        overlap: Overlap | None = None,
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.max_batch = max_batch
        is_cuda = self.device.type == "cuda"
        self.capability = torch.cuda.get_device_capability(self.device) if is_cuda else (8, 9)
        limits.check(spec, self.capability)
        self.hopper_reason = limits.hopper_unsupported_reason(spec, self.capability)
        sm_count = torch.cuda.get_device_properties(self.device).multi_processor_count if is_cuda else 4
        self.geometry = Geometry(
            num_kv_heads=spec.num_kv_heads,
            gqa_group=spec.gqa_group,
            num_ctas=num_ctas or sm_count,
            tile_rows=self._tile_rows(),
            split_tokens=split_tokens,
        )
        self.passes = Pass(0)
        # Where both passes wait the prefix goes first: its blocks need a whole SM, those of the suffix fit around them.
        self.prefix_stream = torch.cuda.Stream(self.device, priority=-1) if is_cuda else None  # type: ignore[no-untyped-call]
        self._overlap = overlap or (Overlap() if self.hopper_reason is None else _PORTABLE)
        self._prefix_key: object = None
        self._ctas_key: object = None
        self._ctas = 0
        self._prefix: workplan.PrefixPlan | None = None
        self._allocate(max_tokens)

    def suffix_capacity(self, batch: int) -> int:
        """Suffix chunks of a launch for `batch` rows: the grid that a graph of this batch size records."""
        if self.geometry.split_tokens:
            return batch + -(-self.indices.shape[0] // self.geometry.split_tokens)
        return batch + -(-_SUFFIX_CTAS_PER_SM * self.geometry.num_ctas // self.spec.num_kv_heads)

    def update(
        self,
        step: DecodeStep,
        choice: Choice,
        table: Tensor,
        table_rows: Tensor,
        *,
        padded_batch: int | None = None,
        captured: Pass | None = None,
    ) -> Pass:
        """Plans a step and starts its copies on the current stream; no synchronisation. Returns the passes it needs.

        `table` int32 [rows, positions] maps positions to slots, `table_rows` [batch] picks each row's line; the slots
        of a shared prefix are read from the line of its first member. With `captured`, refuses a step that the graph
        recorded with these passes and `padded_batch` rows cannot serve. Groups on STOCK or PAGED are not shared.
        """
        padded = padded_batch or step.batch_size
        self._check(step, padded)
        prefix = self._plan_prefix(step, choice)
        split_tokens = self.geometry.split_tokens
        suffix = workplan.plan_suffix(step.seq_lens, prefix, self.suffix_capacity(padded), split_tokens=split_tokens)
        if suffix.packed_tokens > self.indices.shape[0]:
            raise LayoutError(f"{suffix.packed_tokens} slots to pack, max_tokens is {self.indices.shape[0]}")
        needed = self._needed(prefix, suffix, padded)
        if captured is not None and needed & ~captured:
            raise LayoutError(f"the step needs {needed}, the graph recorded {captured}; capture another variant")
        copies = np.concatenate([prefix.copies, suffix.copies])
        counts = np.asarray([len(suffix.items)], np.int32)
        sections = {"counts": counts, "items": suffix.items, "indptr": suffix.row_indptr, "copies": copies}
        self.suffix_words.fill(sections, {"indptr": len(suffix.items)})
        if len(copies):
            grid = (len(copies), triton.cdiv(int(copies[:, 2].max()), _SNAPSHOT_BLOCK))
            snapshot_kernel[grid](
                table, table_rows, self.suffix_words["copies"], self.indices, table.stride(0),
                COPY_WIDTH=COPY_WIDTH, BLOCK=_SNAPSHOT_BLOCK,
            )  # fmt: skip
        self.passes = needed
        return needed

    def _plan_prefix(self, step: DecodeStep, choice: Choice) -> workplan.PrefixPlan:
        """Groups change rarely: the plan is made, and copied to the device, only when they or the SM share do."""
        size = workplan.prefix_size(step, choice, self.geometry)
        shared_tokens = sum(len(group.rows) * group.prefix_tokens for group, _ in workplan.shared_groups(step, choice))
        token_bytes = 2 * self.spec.num_kv_heads * self.spec.head_dim * (1 if self.spec.kv_dtype == limits.FP8 else 2)
        suffix_bytes = max(0, sum(step.seq_lens) - shared_tokens) * token_bytes
        num_ctas = self._prefix_ctas(size, suffix_bytes)
        shared = tuple((group.rows, path, _layout(group)) for group, path in workplan.shared_groups(step, choice))
        key = (step.batch_size, shared, num_ctas)
        if self._prefix is None or key != self._prefix_key:
            prefix = workplan.plan_prefix(step, choice, self.geometry, num_ctas)
            if prefix.partial_rows > self.suffix_base:
                raise LayoutError(
                    f"{prefix.partial_rows} prefix partials, room for {self.suffix_base}; raise max_batch"
                )
            sections = {
                "dense_items": prefix.dense.words(),
                "gather_items": prefix.gather.words(),
                "group_rows": prefix.group_rows,
                "row_first": prefix.row_first,
                "row_sources": prefix.row_sources,
                "row_stride": prefix.row_stride,
            }
            self.prefix_words.fill(sections, {"row_sources": 0})
            self._prefix, self._prefix_key = prefix, key
        return self._prefix

    def _prefix_ctas(self, size: PrefixSize, suffix_bytes: int) -> int:
        """Decided anew only when the suffixes have grown by a fifth, so that a plan lasts for many steps."""
        bucket = int(4 * math.log2(suffix_bytes)) if suffix_bytes else -1
        if (size, bucket) != self._ctas_key:
            self._ctas = self._overlap.prefix_ctas(size, suffix_bytes, self.geometry.num_ctas)
            self._ctas_key = (size, bucket)
        return self._ctas

    def _needed(self, prefix: workplan.PrefixPlan, suffix: workplan.SuffixPlan, padded: int) -> Pass:
        needed = Pass(0)
        if len(prefix.dense.items):
            needed |= Pass.DENSE
        if len(prefix.gather.items):
            needed |= Pass.GATHER
        if len(suffix.items):
            needed |= Pass.SUFFIX
        if int(suffix.items[:, 3].sum()) < padded:
            needed |= Pass.MERGE
        return needed

    def _check(self, step: DecodeStep, padded: int) -> None:
        heads = (step.num_q_heads, step.num_kv_heads, step.head_dim)
        planned = (self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.head_dim)
        if heads != planned:
            raise LayoutError(f"the step has (query heads, KV heads, head_dim) {heads}, the planner {planned}")
        if not step.batch_size <= padded <= self.max_batch:
            raise LayoutError(f"{step.batch_size} rows padded to {padded}; max_batch is {self.max_batch}")

    def _tile_rows(self) -> int:
        """Query rows of a prefix tile: two warp groups of 64 on Hopper, else no more than the batch can fill."""
        if self.hopper_reason is None:
            return 128
        most = 128 if self.spec.head_dim <= 128 else 64
        return min(most, max(16, 1 << (self.max_batch * self.spec.gqa_group - 1).bit_length()))

    def _allocate(self, max_tokens: int) -> None:
        spec, geometry = self.spec, self.geometry
        tiles = self.max_batch  # every group has at least one row
        items = tiles * spec.num_kv_heads * (MAX_SEGMENTS + 1) + 3 * geometry.num_ctas
        prefix_rows = self.max_batch * spec.num_q_heads * (MAX_SEGMENTS + 1)
        prefix_rows += 2 * geometry.num_ctas * geometry.tile_rows
        self.indices = torch.zeros(max_tokens, dtype=torch.int32, device=self.device)
        chunks = self.suffix_capacity(self.max_batch)
        self.prefix_words = _Words(
            {
                "dense_items": items * PREFIX_ITEM_WIDTH,
                "gather_items": items * PREFIX_ITEM_WIDTH,
                "group_rows": self.max_batch,
                "row_first": self.max_batch * spec.num_kv_heads,
                "row_sources": self.max_batch * spec.num_kv_heads,
                "row_stride": self.max_batch,
            },
            self.device,
        )
        self.suffix_words = _Words(
            {
                "counts": 4,
                "items": chunks * SUFFIX_ITEM_WIDTH,
                "indptr": self.max_batch + 1,
                "copies": self.max_batch * (MAX_SEGMENTS + 2) * COPY_WIDTH,
            },
            self.device,
        )

        def fp32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self.device)

        # Partials of the prefix items, then those of the suffix chunks [chunk, query head].
        self.suffix_base = prefix_rows
        self.part_out = fp32(prefix_rows + chunks * spec.num_q_heads, spec.head_dim)
        self.part_lse = fp32(prefix_rows + chunks * spec.num_q_heads)


def _layout(group: PrefixGroup) -> tuple[tuple[int, int], ...]:
    """What a plan knows of a prefix: where its runs lie; slots are read from the table."""
    return tuple(
        (piece.start_slot if isinstance(piece, Segment) else -1, piece.length_tokens) for piece in group.pieces
    )
