"""The host's part of planning, kept from step to step: what is made anew, and how much of the device a pass gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Flag, auto

from prefixonce import limits, workplan
from prefixonce.dealing import Geometry, ceil_div
from prefixonce.limits import HeadSpec
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup, Segment
from prefixonce.workplan import PrefixPlan, PrefixSize, SuffixPlan

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


PORTABLE_OVERLAP = Overlap(run_block_us=2.5, slot_block_us=2.7)  # the plain Triton kernel, on the same GPU


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """A step as its kernels need it. `prefix` is the very object of the step before if the device has it already."""

    prefix: PrefixPlan
    suffix: SuffixPlan
    passes: Pass


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What depends on groups and choice alone. `layout` is what a prefix plan is made of, by value."""

    groups: tuple[PrefixGroup, ...]
    choice: Choice
    size: PrefixSize
    tokens_per_row: int
    layout: tuple[tuple[tuple[int, ...], Path, tuple[tuple[int, int], ...]], ...]


class HostPlanner:
    """Plans are functions of the step, with one exception: how the SMs are shared lasts while suffixes grow a little.

    `max_tokens` bounds the chunks of a launch when `geometry.split_tokens` fixes their length.
    """

    def __init__(self, spec: HeadSpec, geometry: Geometry, overlap: Overlap, *, max_tokens: int) -> None:
        self.geometry = geometry
        self._max_tokens = max_tokens
        self._token_bytes = 2 * spec.num_kv_heads * spec.head_dim * (1 if spec.kv_dtype == limits.FP8 else 2)
        self._overlap = overlap
        self._shared: _Shared | None = None
        self._ctas_key: object = None
        self._ctas = 0
        self._prefix_key: object = None
        self._prefix: PrefixPlan | None = None
        self._chunk_tokens = 0

    def suffix_capacity(self, batch: int) -> int:
        """Suffix chunks of a launch for `batch` rows."""
        if self.geometry.split_tokens:
            return batch + ceil_div(self._max_tokens, self.geometry.split_tokens)
        return batch + ceil_div(_SUFFIX_CTAS_PER_SM * self.geometry.num_ctas, self.geometry.num_kv_heads)

    def plan(self, step: DecodeStep, choice: Choice, padded_batch: int) -> HostPlan:
        """Groups and choices that are the objects of the step before are not looked at again."""
        shared = self._shared
        if shared is None or step.groups is not shared.groups or choice is not shared.choice:
            shared = self._shared = self._summarize(step, choice)
        prefix = self._plan_prefix(step, shared)
        suffix = workplan.plan_suffix(
            step.seq_lens,
            prefix,
            self.suffix_capacity(padded_batch),
            split_tokens=self.geometry.split_tokens,
            likely_tokens=self._chunk_tokens,
        )
        self._chunk_tokens = suffix.chunk_tokens
        return HostPlan(prefix, suffix, _passes(prefix, suffix, padded_batch))

    def _summarize(self, step: DecodeStep, choice: Choice) -> _Shared:
        pairs = workplan.shared_groups(step, choice)
        return _Shared(
            step.groups,
            choice,
            workplan.prefix_size(step, choice, self.geometry),
            sum(len(group.rows) * group.prefix_tokens for group, _ in pairs),
            tuple((group.rows, path, _layout(group)) for group, path in pairs),
        )

    def _plan_prefix(self, step: DecodeStep, shared: _Shared) -> PrefixPlan:
        own_tokens = max(0, int(step.lengths.sum()) - shared.tokens_per_row)
        num_ctas = self._prefix_ctas(shared.size, own_tokens * self._token_bytes)
        key = (step.batch_size, num_ctas, shared.layout)
        if self._prefix is None or key != self._prefix_key:
            self._prefix = workplan.plan_prefix(step, shared.choice, self.geometry, num_ctas)
            self._prefix_key = key
        return self._prefix

    def _prefix_ctas(self, size: PrefixSize, suffix_bytes: int) -> int:
        """Decided anew only when the suffixes have grown by a fifth, so that a plan lasts for many steps."""
        bucket = int(4 * math.log2(suffix_bytes)) if suffix_bytes else -1
        if (size, bucket) != self._ctas_key:
            self._ctas = self._overlap.prefix_ctas(size, suffix_bytes, self.geometry.num_ctas)
            self._ctas_key = (size, bucket)
        return self._ctas


def _passes(prefix: PrefixPlan, suffix: SuffixPlan, padded_batch: int) -> Pass:
    needed = Pass(0)
    if len(prefix.dense.items):
        needed |= Pass.DENSE
    if len(prefix.gather.items):
        needed |= Pass.GATHER
    if len(suffix.items):
        needed |= Pass.SUFFIX
    if int(suffix.items[:, 3].sum()) < padded_batch:
        needed |= Pass.MERGE
    return needed


def _layout(group: PrefixGroup) -> tuple[tuple[int, int], ...]:
    """What a plan knows of a prefix: where its runs lie; slots are read from the table."""
    return tuple(
        (piece.start_slot if isinstance(piece, Segment) else -1, piece.length_tokens) for piece in group.pieces
    )
