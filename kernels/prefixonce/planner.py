"""Static device buffers that hold the plan of one decode step, so that a captured CUDA graph replays with another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import triton
from torch import Tensor

from prefixonce import limits
from prefixonce.dealing import Geometry, IntArray
from prefixonce.errors import LayoutError
from prefixonce.growth import Growth
from prefixonce.hostplan import PORTABLE_OVERLAP, HostPlanner, Overlap, Pass
from prefixonce.limits import HeadSpec
from prefixonce.paged import grow_kernel, snapshot_kernel
from prefixonce.prefixwork import COPY_WIDTH, MAX_SEGMENTS
from prefixonce.step import Choice, DecodeStep
from prefixonce.workplan import PREFIX_ITEM_WIDTH, SUFFIX_ITEM_WIDTH, PrefixPlan

__all__ = ["Overlap", "Pass", "StepPlanner"]

_SNAPSHOT_BLOCK = 1024
_GROW_ROWS = 128  # of a thread block
_COPY_GAP_WORDS = 8192  # an unused stretch of this length is not worth copying; a shorter one costs less than a copy


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
        self._sections = {name: self._device[where] for name, where in self._slices.items()}
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(end, dtype=torch.int32, pin_memory=pinned) for _ in range(self._RING)]
        self._free = [torch.cuda.Event() for _ in range(self._RING)] if pinned else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._sections[name]

    def fill(self, sections: Mapping[str, IntArray], rest: Mapping[str, int]) -> None:
        """Copies every section; `rest` is the value after the end of a section that is shorter than its room."""
        self._turn = (self._turn + 1) % self._RING
        if self._free is not None:
            self._free[self._turn].synchronize()  # the copy of two updates ago: over unless the host is far ahead
        host = self._staging[self._turn].numpy()
        spans: list[slice] = []
        for name, where in self._slices.items():
            values = sections[name]
            room = host[where]
            if values.size > room.size:
                raise LayoutError(f"{name} needs {values.size} words, room for {room.size}; raise max_batch")
            room[: values.size] = values.reshape(-1)
            if name in rest:
                room[values.size :] = rest[name]
            used = slice(where.start, where.stop if name in rest else where.start + values.size)
            if spans and used.start - spans[-1].stop < _COPY_GAP_WORDS:
                used = slice(spans.pop().start, used.stop)
            spans.append(used)
        for span in spans:
            self._device[span].copy_(self._staging[self._turn][span], non_blocking=True)
        if self._free is not None:
            self._free[self._turn].record()


class StepPlanner:
    """Owns every buffer that the kernels of a step read or write besides q, K, V and out.

    One planner serves all layers and all captured batch sizes up to `max_batch`: `update` before each step, outside
    the graph; `attend` in every layer. `max_tokens` bounds the slots packed per step (all suffixes, plus each prefix
    that is read through slots; where steps have a `rows_id`, `MOST_STEPS` more per row).
    `split_tokens` fixes where keys are cut, see `Geometry`.
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
        overlap = overlap or (Overlap() if self.hopper_reason is None else PORTABLE_OVERLAP)
        self.host = HostPlanner(spec, self.geometry, overlap, max_tokens=max_tokens)
        self.passes = Pass(0)
        # Where both passes wait the prefix goes first: its blocks need a whole SM, those of the suffix fit around them.
        self.prefix_stream = torch.cuda.Stream(self.device, priority=-1) if is_cuda else None  # type: ignore[no-untyped-call]
        self._sent_prefix: PrefixPlan | None = None
        self._growth = Growth()
        self._first_copy = 0  # of the rows' own slots, behind those of the prefixes
        self._allocate(max_tokens)

    def suffix_capacity(self, batch: int) -> int:
        """Suffix chunks of a launch for `batch` rows: the grid that a graph of this batch size records."""
        return self.host.suffix_capacity(batch)

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
        A step in which the rows of the last plan only grew keeps that plan and starts one kernel (`Growth`).

        `table` int32 [rows, positions] maps positions to slots, `table_rows` [batch] picks each row's line; the slots
        of a shared prefix are read from the line of its first member. With `captured`, refuses a step that the graph
        recorded with these passes and `padded_batch` rows cannot serve. Groups on STOCK or PAGED are not shared.
        """
        padded = padded_batch or step.batch_size
        steps = self._growth.steps(step, choice, padded)
        if steps and (captured is None or not self.passes & ~captured):
            self._grow(steps, step.batch_size, table, table_rows)
            return self.passes
        self._growth.end()
        self._check(step, padded)
        plan = self.host.plan(step, choice, padded)
        prefix, suffix = plan.prefix, plan.suffix
        if suffix.packed_tokens > self.indices.shape[0]:
            raise LayoutError(f"{suffix.packed_tokens} slots to pack, max_tokens is {self.indices.shape[0]}")
        if captured is not None and plan.passes & ~captured:
            raise LayoutError(f"the step needs {plan.passes}, the graph recorded {captured}; capture another variant")
        if prefix is not self._sent_prefix:
            self._send(prefix)
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
        self.passes = plan.passes
        self._first_copy = len(prefix.copies)
        if plan.can_grow:
            self._growth.begin(step, choice, padded)
        return plan.passes

    def _grow(self, steps: int, batch: int, table: Tensor, table_rows: Tensor) -> None:
        words = self.suffix_words
        grow_kernel[(-(-batch // _GROW_ROWS),)](
            table, table_rows, words["copies"], words["indptr"], words["items"], self.indices,
            self._first_copy, steps, batch, table.stride(0),
            COPY_WIDTH=COPY_WIDTH, ITEM_WIDTH=SUFFIX_ITEM_WIDTH, BLOCK=_GROW_ROWS,
        )  # fmt: skip

    def _send(self, prefix: PrefixPlan) -> None:
        if prefix.partial_rows > self.suffix_base:
            raise LayoutError(f"{prefix.partial_rows} prefix partials, room for {self.suffix_base}; raise max_batch")
        sections = {
            "group_rows": prefix.group_rows,
            "row_first": prefix.row_first,
            "row_sources": prefix.row_sources,
            "row_stride": prefix.row_stride,
            "dense_items": prefix.dense.words(),
            "gather_items": prefix.gather.words(),
        }
        self.prefix_words.fill(sections, {"row_sources": 0})
        self._sent_prefix = prefix

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
                "group_rows": self.max_batch,
                "row_first": self.max_batch * spec.num_kv_heads,
                "row_sources": self.max_batch * spec.num_kv_heads,
                "row_stride": self.max_batch,
                "dense_items": items * PREFIX_ITEM_WIDTH,
                "gather_items": items * PREFIX_ITEM_WIDTH,
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
