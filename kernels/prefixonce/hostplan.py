"""The host's part of planning, kept from step to step: what is made anew, and how much of the device a pass gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Flag, auto

import numpy as np
from numpy.typing import NDArray

from prefixonce import limits, workplan
from prefixonce.dealing import Geometry, ceil_div
from prefixonce.growth import MOST_STEPS
from prefixonce.limits import HeadSpec
from prefixonce.prefixwork import PrefixCut, PrefixSize, PrefixWork, cut_prefix, prefix_work
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup
from prefixonce.workplan import PrefixPlan, SuffixPlan

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
    """A step as its kernels need it. `prefix` is the very object of the step before if the device has it already.
    With `can_grow` the plan has room for rows that grow, see `Growth`."""

    prefix: PrefixPlan
    suffix: SuffixPlan
    passes: Pass
    can_grow: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What depends on groups and choice alone. `cuts` are of the pieces with an id, for the dense kernel or not."""

    groups: tuple[PrefixGroup, ...]
    choice: Choice
    rows: list[tuple[int, ...]]
    tokens_per_row: int
    cuts: dict[tuple[int, bool], PrefixCut]
    work: PrefixWork


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
        self._suffix: SuffixPlan | None = None

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
        lengths = step.lengths
        can_grow = step.rows_id is not None and not self.geometry.split_tokens  # fixed cuts cannot move
        prefix = self._plan_prefix(lengths, shared)
        suffix = self._suffix = workplan.plan_suffix(
            lengths,
            prefix,
            self.suffix_capacity(padded_batch),
            split_tokens=self.geometry.split_tokens,
            room_tokens=MOST_STEPS if can_grow else 0,
            before=self._suffix,
        )
        can_grow &= len(suffix.copies) == len(lengths)  # a row without a chunk has nothing that could
        return HostPlan(prefix, suffix, _passes(prefix, suffix, padded_batch), can_grow)

    def _summarize(self, step: DecodeStep, choice: Choice) -> _Shared:
        known = self._shared.cuts if self._shared else {}
        per_tile, block_tokens = self.geometry.members_per_tile, self.geometry.block_tokens
        cuts: dict[tuple[int, bool], PrefixCut] = {}
        rows, tiles, used = [], [], []
        tokens_per_row = 0
        for group, path in workplan.shared_groups(step, choice):
            key = id(group.pieces), path is Path.DENSE
            cut = known.get(key) or cut_prefix(group.pieces, path, block_tokens)
            cuts[key] = cut
            used.append(cut)
            rows.append(group.rows)
            tiles.append(-(-len(group.rows) // per_tile))
            tokens_per_row += len(group.rows) * cut.tokens
        work = prefix_work(tuple(tiles), tuple(used), self.geometry)
        return _Shared(step.groups, choice, rows, tokens_per_row, cuts, work)

    def _plan_prefix(self, lengths: NDArray[np.int64], shared: _Shared) -> PrefixPlan:
        own_tokens = max(0, int(lengths.sum()) - shared.tokens_per_row)
        num_ctas = self._prefix_ctas(shared.work.size, own_tokens * self._token_bytes)
        key = (len(lengths), num_ctas, shared)
        if self._prefix is None or key != self._prefix_key:
            self._prefix = workplan.plan_rows(lengths, shared.rows, shared.work, num_ctas)
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
    if suffix.whole_rows < padded_batch:
        needed |= Pass.MERGE
    return needed
