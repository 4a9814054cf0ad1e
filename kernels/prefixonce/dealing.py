"""Deals the keys of shared prefixes to thread blocks. Integers and numpy only.

A *load* is what one group has for one kernel: query tiles times runs of keys. Every (tile, KV head, key) goes to one
thread block, in such a way that all finish together and tiles that read the same keys run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

_ITEM_COST_BLOCKS = 2.5  # loading a query tile and storing its partial, in units of one key block
_SOURCE_COST_BLOCKS = 0.2  # one more partial to merge


@dataclass(frozen=True, slots=True)
class Geometry:
    """Fixed for the life of a planner. `block_tokens` keys are one step of the prefix kernels.

    `split_tokens` 0 cuts work so that the device is full; otherwise every cut is a multiple of it, which makes the
    order of additions of a row independent of the rest of the batch.
    """

    num_kv_heads: int
    gqa_group: int
    num_ctas: int
    tile_rows: int
    block_tokens: int = 128
    split_tokens: int = 0

    @property
    def members_per_tile(self) -> int:
        """Requests in one query tile; the heads of a request never straddle two tiles."""
        return self.tile_rows // self.gqa_group


class Load(NamedTuple):
    """The prefix of one group as one kernel sees it: `tiles` query tiles times `pieces` (first key, keys)."""

    tiles: int
    pieces: tuple[tuple[int, int], ...]


class _Fragment(NamedTuple):
    load: int
    tile: int
    head: int
    key: int
    keys: int


class Dealt(NamedTuple):
    """`parts` [n, 4] are (tile, head, first key, keys), `load` [n] whose; in the order of thread blocks."""

    load: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    cta_indptr: IntArray


def deal(loads: tuple[Load, ...], geometry: Geometry, num_ctas: int) -> Dealt:
    """The work of `geometry.num_ctas` thread blocks, at most `num_ctas` of them busy."""
    if not loads:
        dealt: list[list[_Fragment]] = []
    elif geometry.split_tokens or sum(load.tiles for load in loads) > num_ctas:
        dealt = _deal_in_order(loads, geometry, num_ctas)
    else:
        dealt = _deal_columns(loads, geometry, num_ctas)
    table = np.asarray([part for cta in dealt for part in cta], np.int64).reshape(-1, 5)
    idle = [0] * (geometry.num_ctas - len(dealt))
    return Dealt(table[:, 0], table[:, 1:], indptr_of([*map(len, dealt), *idle]))


def _deal_columns(loads: Sequence[Load], geometry: Geometry, num_ctas: int) -> list[list[_Fragment]]:
    """A *column* is one thread block per tile of a group, all reading the same keys at the same time (from L2).

    Columns go to the group that would finish last, then each group's keys are cut evenly over its columns.
    """
    length = [_blocks(load, geometry) for load in loads]
    columns = [1] * len(loads)
    free = num_ctas - sum(load.tiles for load in loads)
    waiting = set(range(len(loads)))
    while waiting:
        last = max(waiting, key=lambda i: (length[i] / columns[i], -i))
        if loads[last].tiles <= free and columns[last] < length[last]:
            columns[last] += 1
            free -= loads[last].tiles
        else:
            waiting.discard(last)
    dealt: list[list[_Fragment]] = []
    for number, (load, most, total) in enumerate(zip(loads, columns, length, strict=True)):
        count = _best_columns(most, total, geometry.num_kv_heads)
        for column in range(count):
            keys = list(_cut(load, geometry, column * total // count, (column + 1) * total // count))
            for tile in range(load.tiles):
                dealt.append([_Fragment(number, tile, *part) for part in keys])
    return dealt


def _best_columns(most: int, blocks: int, heads: int) -> int:
    """Fewer columns are better when the last few only cut heads in two, or make more partials than they save time."""

    def cost(count: int) -> float:
        cuts = 1 if count % heads == 0 else heads / count if heads % count == 0 else heads / count + 1
        return ceil_div(blocks, count) + _ITEM_COST_BLOCKS * cuts + _SOURCE_COST_BLOCKS * count / heads

    return min(range(1, most + 1), key=cost)


def _deal_in_order(loads: Sequence[Load], geometry: Geometry, num_ctas: int) -> list[list[_Fragment]]:
    """More tiles than thread blocks, or fixed cuts: equal shares of the sequence (group, head, tile, keys)."""
    units = [
        _Fragment(number, tile, head, key + cut, min(length, keys - cut))
        for number, load in enumerate(loads)
        for head in range(geometry.num_kv_heads)
        for key, keys in load.pieces
        for length in (geometry.split_tokens or keys,)
        for cut in range(0, keys, length)
        for tile in range(load.tiles)
    ]
    blocks = [ceil_div(unit.keys, geometry.block_tokens) for unit in units]
    total = sum(blocks)
    dealt: list[list[_Fragment]] = [[] for _ in range(min(num_ctas, total))]
    done = 0
    for unit, size in zip(units, blocks, strict=True):
        taken = 0
        while taken < size:
            cta = (done + taken) * len(dealt) // total
            share_end = ceil_div((cta + 1) * total, len(dealt))
            take = size if geometry.split_tokens else min(size - taken, share_end - done - taken)
            first = taken * geometry.block_tokens
            keys = min(take * geometry.block_tokens, unit.keys - first)
            dealt[cta].append(_Fragment(unit.load, unit.tile, unit.head, unit.key + first, keys))
            taken += take
        done += size
    return dealt


def _blocks(load: Load, geometry: Geometry) -> int:
    return geometry.num_kv_heads * sum(ceil_div(keys, geometry.block_tokens) for _, keys in load.pieces)


def _cut(load: Load, geometry: Geometry, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(head, first key, keys) of the blocks `begin .. end` in the sequence (head, piece, block)."""
    position = 0
    for head in range(geometry.num_kv_heads):
        for key, keys in load.pieces:
            size = ceil_div(keys, geometry.block_tokens)
            low, high = max(begin - position, 0), min(end - position, size)
            if low < high:
                first = low * geometry.block_tokens
                yield head, key + first, min(high * geometry.block_tokens, keys) - first
            position += size


def indptr_of(counts: Sequence[int] | npt.NDArray[np.int64]) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int32)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
