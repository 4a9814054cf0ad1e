"""Host planning: which thread block reads which keys for which queries. Integers and numpy only; no torch, no triton.

The prefix of a group is cut into *items*: one query tile, one KV head, one run of keys, one fp32 partial. Items are
dealt to a fixed number of thread blocks so that all finish together and the tiles that read the same keys run at the
same time. Everything a row reads alone is the *suffix*, cut into chunks of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixonce.errors import LayoutError
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup, Segment

IntArray = npt.NDArray[np.int32]

PREFIX_ITEM_WIDTH = 8  # first member, query rows, KV head, first key, keys, first partial row, two of `words`
SUFFIX_ITEM_WIDTH = 4  # batch row, first key, keys, 1 if the row has no other partial
COPY_WIDTH = 4  # batch row, first position, tokens, first packed index
MAX_SEGMENTS = 4  # longer chains are read through slots, which bounds the partials of a row
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


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """`items` [n, PREFIX_ITEM_WIDTH]; thread block c runs items `cta_indptr[c] .. cta_indptr[c + 1]`."""

    items: IntArray
    cta_indptr: IntArray

    def words(self) -> IntArray:
        """As kernels read them: the first item of thread block c at index c, all others after those.

        Word 6 of an item is the index of its thread block's next one, word 7 at index c is c; -1 if there is none.
        """
        counts = np.diff(self.cta_indptr)
        busy = np.flatnonzero(counts)
        is_first = np.zeros(len(self.items) + 1, np.bool_)
        is_first[self.cta_indptr[busy]] = is_first[-1] = True
        index = np.full(len(self.items) + 1, -1)
        index[:-1][is_first[:-1]] = busy
        index[~is_first] = len(counts) + np.arange(np.count_nonzero(~is_first))
        words = np.full((len(counts) + len(self.items) - len(busy), PREFIX_ITEM_WIDTH), -1, np.int32)
        words[index[:-1], :6] = self.items[:, :6]
        words[index[:-1], 6] = np.where(is_first[1:], -1, index[1:])
        words[busy, 7] = busy
        return words


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """Query tile t and KV head h have `diff(source_indptr)[t * heads + h]` partials, one after the other.

    `row_tile` is t * heads, or -1 for rows without a shared prefix. The first query of batch row r and KV head h has
    its partials in rows row_first[r, h] + i * row_stride[r], i < row_sources[r, h]. `copies` are the slot lists that
    the gather items read; they fill the first `packed_tokens` of the packed indices.
    """

    dense: ItemList
    gather: ItemList
    group_rows: IntArray
    row_tile: IntArray
    row_prefix: IntArray
    row_first: IntArray
    row_sources: IntArray
    row_stride: IntArray
    source_indptr: IntArray
    copies: IntArray
    packed_tokens: int
    partial_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class SuffixPlan:
    """`items` [n, SUFFIX_ITEM_WIDTH] with those of row r at `row_indptr[r] .. row_indptr[r + 1]`."""

    items: IntArray
    row_indptr: IntArray
    copies: IntArray
    packed_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixSize:
    """The prefix pass before it is dealt: query tiles, the fewest items, and key blocks summed over all items, from
    contiguous runs and through slot lists."""

    tiles: int
    items: int
    run_blocks: int
    slot_blocks: int


@dataclass(frozen=True, slots=True)
class _Load:
    """The prefix of one group as one kernel sees it: `tiles` query tiles times `pieces` (first key, keys)."""

    first_tile: int
    first_member: int
    members: int
    tiles: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Fragment:
    load: _Load
    tile: int
    head: int
    key: int
    keys: int


def shared_groups(step: DecodeStep, choice: Choice) -> list[tuple[PrefixGroup, Path]]:
    """The groups whose prefix is read once; all other rows read everything they own."""
    pairs = zip(step.groups, choice.paths, strict=True)
    return [(group, path) for group, path in pairs if path in (Path.CASCADE, Path.DENSE) and group.prefix_tokens]


def prefix_size(step: DecodeStep, choice: Choice, geometry: Geometry) -> PrefixSize:
    tiles = items = run_blocks = slot_blocks = 0
    for group, path in shared_groups(step, choice):
        group_tiles = _ceil(len(group.rows), geometry.members_per_tile)
        tiles += group_tiles
        items += group_tiles * geometry.num_kv_heads
        run_tokens = group.contiguous_tokens if path is Path.DENSE else 0
        run_blocks += group_tiles * geometry.num_kv_heads * _ceil(run_tokens, geometry.block_tokens)
        slot_tokens = group.prefix_tokens - run_tokens
        slot_blocks += group_tiles * geometry.num_kv_heads * _ceil(slot_tokens, geometry.block_tokens)
    return PrefixSize(tiles, items, run_blocks, slot_blocks)


def plan_prefix(step: DecodeStep, choice: Choice, geometry: Geometry, num_ctas: int) -> PrefixPlan:
    """Deals the shared prefixes of a step to `num_ctas` thread blocks."""
    row_tile = np.full(step.batch_size, -1, np.int32)
    row_query = np.zeros(step.batch_size, np.int32)
    row_stride = np.zeros(step.batch_size, np.int32)
    row_prefix = np.zeros(step.batch_size, np.int32)
    group_rows: list[int] = []
    copies: list[tuple[int, int, int, int]] = []
    dense: list[_Load] = []
    gather: list[_Load] = []
    packed = tiles = 0
    per_tile = geometry.members_per_tile
    for group, path in shared_groups(step, choice):
        rows = np.asarray(group.rows, np.int64)
        if step.batch_size <= rows.max() or group.prefix_tokens > min(step.seq_lens[row] for row in group.rows):
            raise LayoutError(f"a prefix of {group.prefix_tokens} tokens does not fit every row of {group.rows}")
        if (row_tile[rows] >= 0).any():
            raise LayoutError(f"a row of {group.rows} is in two groups; a row shares one prefix")
        member = np.arange(len(rows))
        row_tile[rows] = (tiles + member // per_tile) * geometry.num_kv_heads
        row_query[rows] = member % per_tile * geometry.gqa_group
        row_stride[rows] = np.minimum(per_tile, len(rows) - member // per_tile * per_tile) * geometry.gqa_group
        row_prefix[rows] = group.prefix_tokens
        runs, loose = _split_pieces(group, path, geometry.block_tokens)
        count = _ceil(len(rows), per_tile)
        if runs:
            dense.append(_Load(tiles, len(group_rows), len(rows), count, tuple(runs)))
        if loose:
            start = packed
            for position, tokens in loose:
                copies.append((group.rows[0], position, tokens, packed))
                packed += tokens
            gather.append(_Load(tiles, len(group_rows), len(rows), count, ((start, packed - start),)))
        group_rows.extend(group.rows)
        tiles += count
    dealt = [_deal(loads, geometry, num_ctas) for loads in (dense, gather)]
    items, source_indptr, unit_first = _lay_out(
        [part for each in dealt for cta in each for part in cta], tiles, geometry
    )
    lists = []
    for fragments in dealt:
        cta_indptr = _indptr([len(cta) for cta in fragments])
        lists.append(ItemList(items[: cta_indptr[-1]], cta_indptr))
        items = items[cta_indptr[-1] :]
    is_shared = row_tile >= 0
    units = row_tile[is_shared, None] + np.arange(geometry.num_kv_heads)
    row_first = np.zeros((step.batch_size, geometry.num_kv_heads), np.int32)
    row_first[is_shared] = unit_first[units] + row_query[is_shared, None]
    row_sources = np.zeros_like(row_first)
    row_sources[is_shared] = np.diff(source_indptr)[units]
    return PrefixPlan(
        dense=lists[0],
        gather=lists[1],
        group_rows=np.asarray(group_rows, np.int32),
        row_tile=row_tile,
        row_prefix=row_prefix,
        row_first=row_first,
        row_sources=row_sources,
        row_stride=row_stride,
        source_indptr=source_indptr,
        copies=np.asarray(copies, np.int32).reshape(-1, COPY_WIDTH),
        packed_tokens=packed,
        partial_rows=sum(int(work.items[:, 1].sum()) for work in lists),
    )


def _lay_out(parts: Sequence[_Fragment], tiles: int, geometry: Geometry) -> tuple[IntArray, IntArray, IntArray]:
    """Items, `source_indptr` and the first partial row of every (tile, head), whose partials are adjacent."""
    per_tile = geometry.members_per_tile
    items = np.zeros((len(parts), PREFIX_ITEM_WIDTH), np.int32)
    unit = np.empty(len(parts), np.int32)
    for index, part in enumerate(parts):
        first = part.tile * per_tile
        rows = min(per_tile, part.load.members - first) * geometry.gqa_group
        items[index, :5] = (part.load.first_member + first, rows, part.head, part.key, part.keys)
        unit[index] = (part.load.first_tile + part.tile) * geometry.num_kv_heads + part.head
    order = np.argsort(unit, kind="stable")
    ends = np.cumsum(items[order, 1])
    items[order, 5] = ends - items[order, 1]
    indptr = np.searchsorted(unit[order], np.arange(tiles * geometry.num_kv_heads + 1)).astype(np.int32)
    return items, indptr, items[order[indptr[:-1]], 5]


def plan_suffix(
    seq_lens: Sequence[int], prefix: PrefixPlan, capacity: int, granularity: int = 64, split_tokens: int = 0
) -> SuffixPlan:
    """Cuts what every row reads alone into at most `capacity` chunks of one length, a multiple of `granularity`."""
    lengths = np.asarray(seq_lens, np.int64) - prefix.row_prefix
    chunk = split_tokens or _chunk_tokens(lengths, capacity, granularity)
    splits = -(-lengths // chunk)
    if splits.sum() > capacity:
        raise LayoutError(f"{int(splits.sum())} suffix chunks, room for {capacity}; raise max_batch or split_tokens")
    row_indptr = _indptr(splits)
    starts = np.cumsum(lengths) - lengths + prefix.packed_tokens
    rows = np.repeat(np.arange(len(lengths)), splits)
    first = (np.arange(len(rows)) - row_indptr[rows]) * chunk
    items = np.empty((len(rows), SUFFIX_ITEM_WIDTH), np.int32)
    items[:, 0] = rows
    items[:, 1] = starts[rows] + first
    items[:, 2] = np.minimum(chunk, lengths[rows] - first)
    items[:, 3] = (splits[rows] == 1) & (prefix.row_tile[rows] < 0)
    busy = np.flatnonzero(lengths)
    copies = np.stack([busy, prefix.row_prefix[busy], lengths[busy], starts[busy]], axis=1).astype(np.int32)
    return SuffixPlan(items, row_indptr, copies, prefix.packed_tokens + int(lengths.sum()))


def _chunk_tokens(lengths: npt.NDArray[np.int64], capacity: int, granularity: int) -> int:
    """The shortest chunk, in units of `granularity` and at least four of them, whose count fits `capacity`."""
    low, high = 4, max(4, _ceil(int(lengths.max(initial=0)), granularity))
    while low < high:
        middle = (low + high) // 2
        if (-(-lengths // (middle * granularity))).sum() <= capacity:
            high = middle
        else:
            low = middle + 1
    return low * granularity


def _split_pieces(
    group: PrefixGroup, path: Path, block_tokens: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Contiguous runs as (slot, tokens), and what is read through slots as (position, tokens).

    A run shorter than one block is read through slots; so are all but the longest runs of a long chain.
    """
    runs: list[tuple[int, int, int]] = []
    loose: list[tuple[int, int]] = []
    position = 0
    for piece in group.pieces:
        is_run = path is Path.DENSE and isinstance(piece, Segment) and piece.length_tokens >= block_tokens
        if is_run and isinstance(piece, Segment):
            runs.append((piece.length_tokens, position, piece.start_slot))
        elif piece.length_tokens:
            loose.append((position, piece.length_tokens))
        position += piece.length_tokens
    runs.sort(key=lambda run: (-run[0], run[1]))
    loose.extend((position, tokens) for tokens, position, _ in runs[MAX_SEGMENTS:])
    return [(slot, tokens) for tokens, _, slot in runs[:MAX_SEGMENTS]], _joined(sorted(loose))


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring (position, tokens) ranges as one."""
    joined: list[tuple[int, int]] = []
    for position, tokens in ranges:
        if joined and sum(joined[-1]) == position:
            joined[-1] = (joined[-1][0], joined[-1][1] + tokens)
        else:
            joined.append((position, tokens))
    return joined


def _deal(loads: Sequence[_Load], geometry: Geometry, num_ctas: int) -> list[list[_Fragment]]:
    """Fragments of every thread block, `geometry.num_ctas` of them, at most `num_ctas` with work."""
    if not loads:
        return [[] for _ in range(geometry.num_ctas)]
    if geometry.split_tokens or sum(load.tiles for load in loads) > num_ctas:
        dealt = _deal_in_order(loads, geometry, num_ctas)
    else:
        dealt = _deal_columns(loads, geometry, num_ctas)
    return dealt + [[] for _ in range(geometry.num_ctas - len(dealt))]


def _deal_columns(loads: Sequence[_Load], geometry: Geometry, num_ctas: int) -> list[list[_Fragment]]:
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
    for load, most, total in zip(loads, columns, length, strict=True):
        count = _best_columns(most, total, geometry.num_kv_heads)
        for column in range(count):
            keys = list(_cut(load, geometry, column * total // count, (column + 1) * total // count))
            for tile in range(load.tiles):
                dealt.append([_Fragment(load, tile, *part) for part in keys])
    return dealt


def _best_columns(most: int, blocks: int, heads: int) -> int:
    """Fewer columns are better when the last few only cut heads in two, or make more partials than they save time."""

    def cost(count: int) -> float:
        cuts = 1 if count % heads == 0 else heads / count if heads % count == 0 else heads / count + 1
        return _ceil(blocks, count) + _ITEM_COST_BLOCKS * cuts + _SOURCE_COST_BLOCKS * count / heads

    return min(range(1, most + 1), key=cost)


def _deal_in_order(loads: Sequence[_Load], geometry: Geometry, num_ctas: int) -> list[list[_Fragment]]:
    """More tiles than thread blocks, or fixed cuts: equal shares of the sequence (group, head, tile, keys)."""
    units = [
        _Fragment(load, tile, head, key + cut, min(length, keys - cut))
        for load in loads
        for head in range(geometry.num_kv_heads)
        for key, keys in load.pieces
        for length in (geometry.split_tokens or keys,)
        for cut in range(0, keys, length)
        for tile in range(load.tiles)
    ]
    blocks = [_ceil(unit.keys, geometry.block_tokens) for unit in units]
    total = sum(blocks)
    dealt: list[list[_Fragment]] = [[] for _ in range(min(num_ctas, total))]
    done = 0
    for unit, size in zip(units, blocks, strict=True):
        taken = 0
        while taken < size:
            cta = (done + taken) * len(dealt) // total
            share_end = _ceil((cta + 1) * total, len(dealt))
            take = size if geometry.split_tokens else min(size - taken, share_end - done - taken)
            first = taken * geometry.block_tokens
            keys = min(take * geometry.block_tokens, unit.keys - first)
            dealt[cta].append(_Fragment(unit.load, unit.tile, unit.head, unit.key + first, keys))
            taken += take
        done += size
    return dealt


def _blocks(load: _Load, geometry: Geometry) -> int:
    return geometry.num_kv_heads * sum(_ceil(keys, geometry.block_tokens) for _, keys in load.pieces)


def _cut(load: _Load, geometry: Geometry, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(head, first key, keys) of the blocks `begin .. end` in the sequence (head, piece, block)."""
    position = 0
    for head in range(geometry.num_kv_heads):
        for key, keys in load.pieces:
            size = _ceil(keys, geometry.block_tokens)
            low, high = max(begin - position, 0), min(end - position, size)
            if low < high:
                first = low * geometry.block_tokens
                yield head, key + first, min(high * geometry.block_tokens, keys) - first
            position += size


def _indptr(counts: Sequence[int] | npt.NDArray[np.int64]) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int32)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
