"""Host planning: which thread block reads which keys for which queries. Integers and numpy only; no torch, no triton.

The prefix of a group is cut into *items*: one query tile, one KV head, one run of keys, one fp32 partial. Items are
dealt to a fixed number of thread blocks so that all finish together and the tiles that read the same keys run at the
same time. Everything a row reads alone is the *suffix*, cut into chunks of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from prefixonce.dealing import Geometry as Geometry
from prefixonce.dealing import IntArray, Load, ceil_div, deal
from prefixonce.errors import LayoutError
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup, Segment

PREFIX_ITEM_WIDTH = 8  # first member, query rows, KV head, first key, keys, first partial row, two of `words`
SUFFIX_ITEM_WIDTH = 4  # batch row, first key, keys, 1 if the row has no other partial
COPY_WIDTH = 4  # batch row, first position, tokens, first packed index
MAX_SEGMENTS = 4  # longer chains are read through slots, which bounds the partials of a row


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
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixSize:
    """The prefix pass before it is dealt: query tiles, the fewest items, and key blocks summed over all items, from
    contiguous runs and through slot lists."""

    tiles: int
    items: int
    run_blocks: int
    slot_blocks: int


def shared_groups(step: DecodeStep, choice: Choice) -> list[tuple[PrefixGroup, Path]]:
    """The groups whose prefix is read once; all other rows read everything they own."""
    pairs = zip(step.groups, choice.paths, strict=True)
    return [(group, path) for group, path in pairs if path in (Path.CASCADE, Path.DENSE) and group.prefix_tokens]


def prefix_size(step: DecodeStep, choice: Choice, geometry: Geometry) -> PrefixSize:
    tiles = items = run_blocks = slot_blocks = 0
    for group, path in shared_groups(step, choice):
        group_tiles = ceil_div(len(group.rows), geometry.members_per_tile)
        tiles += group_tiles
        items += group_tiles * geometry.num_kv_heads
        run_tokens = group.contiguous_tokens if path is Path.DENSE else 0
        run_blocks += group_tiles * geometry.num_kv_heads * ceil_div(run_tokens, geometry.block_tokens)
        slot_tokens = group.prefix_tokens - run_tokens
        slot_blocks += group_tiles * geometry.num_kv_heads * ceil_div(slot_tokens, geometry.block_tokens)
    return PrefixSize(tiles, items, run_blocks, slot_blocks)


def plan_prefix(step: DecodeStep, choice: Choice, geometry: Geometry, num_ctas: int) -> PrefixPlan:
    """Deals the shared prefixes of a step to `num_ctas` thread blocks."""
    shared = shared_groups(step, choice)
    heads, per_tile = geometry.num_kv_heads, geometry.members_per_tile
    counts = np.fromiter((len(group.rows) for group, _ in shared), np.int64, len(shared))
    prefixes = np.fromiter((group.prefix_tokens for group, _ in shared), np.int64, len(shared))
    rows = np.fromiter(chain.from_iterable(group.rows for group, _ in shared), np.int64, int(counts.sum()))
    group_of = np.repeat(np.arange(len(shared)), counts)
    _check_rows(step, rows, prefixes[group_of])
    tiles = -(-counts // per_tile)
    first_tile, first_member = np.cumsum(tiles) - tiles, np.cumsum(counts) - counts
    member = np.arange(len(rows)) - first_member[group_of]
    tile = member // per_tile
    row_tile = np.full(step.batch_size, -1, np.int32)
    row_tile[rows] = (first_tile[group_of] + tile) * heads
    row_prefix = np.zeros(step.batch_size, np.int32)
    row_prefix[rows] = prefixes[group_of]
    row_stride = np.zeros(step.batch_size, np.int32)
    row_stride[rows] = np.minimum(per_tile, counts[group_of] - tile * per_tile) * geometry.gqa_group
    copies: list[tuple[int, int, int, int]] = []
    loads: tuple[list[Load], list[Load]] = ([], [])
    owners: tuple[list[int], list[int]] = ([], [])
    packed = 0
    for number, ((group, path), count) in enumerate(zip(shared, tiles.tolist(), strict=True)):
        runs, loose = _split_pieces(group, path, geometry.block_tokens)
        if runs:
            loads[0].append(Load(count, tuple(runs)))
            owners[0].append(number)
        if loose:
            start = packed
            for position, tokens in loose:
                copies.append((group.rows[0], position, tokens, packed))
                packed += tokens
            loads[1].append(Load(count, ((start, packed - start),)))
            owners[1].append(number)
    dealt = [deal(tuple(each), geometry, num_ctas) for each in loads]
    owner = np.concatenate([np.asarray(own, np.int64)[each.load] for own, each in zip(owners, dealt, strict=True)])
    parts = np.concatenate([each.parts for each in dealt])
    first = parts[:, 0] * per_tile
    items = np.zeros((len(parts), PREFIX_ITEM_WIDTH), np.int32)
    items[:, 0] = first_member[owner] + first
    items[:, 1] = np.minimum(per_tile, counts[owner] - first) * geometry.gqa_group
    items[:, 2:5] = parts[:, 1:]
    # The partials of a (tile, head) are adjacent, whichever kernel makes them.
    unit = (first_tile[owner] + parts[:, 0]) * heads + parts[:, 1]
    order = np.argsort(unit, kind="stable")
    ends = np.cumsum(items[order, 1])
    items[order, 5] = ends - items[order, 1]
    source_indptr = np.searchsorted(unit[order], np.arange(int(tiles.sum()) * heads + 1)).astype(np.int32)
    unit_first = items[order[source_indptr[:-1]], 5]
    units = row_tile[rows, None] + np.arange(heads)
    row_first = np.zeros((step.batch_size, heads), np.int32)
    row_first[rows] = unit_first[units] + (member % per_tile * geometry.gqa_group)[:, None]
    row_sources = np.zeros_like(row_first)
    row_sources[rows] = np.diff(source_indptr)[units]
    dense_items = len(dealt[0].parts)
    return PrefixPlan(
        dense=ItemList(items[:dense_items], dealt[0].cta_indptr),
        gather=ItemList(items[dense_items:], dealt[1].cta_indptr),
        group_rows=rows.astype(np.int32),
        row_tile=row_tile,
        row_prefix=row_prefix,
        row_first=row_first,
        row_sources=row_sources,
        row_stride=row_stride,
        source_indptr=source_indptr,
        copies=np.asarray(copies, np.int32).reshape(-1, COPY_WIDTH),
        packed_tokens=packed,
        partial_rows=int(ends[-1]) if len(ends) else 0,
    )


def _check_rows(step: DecodeStep, rows: npt.NDArray[np.int64], prefixes: npt.NDArray[np.int64]) -> None:
    """`prefixes` are the shared tokens of each of `rows`."""
    if not len(rows):
        return
    if rows.max() >= step.batch_size:
        raise LayoutError(f"row {rows.max()} is in a group; the step has {step.batch_size} rows")
    lengths = step.lengths[rows]
    if (lengths < prefixes).any():
        at = int((lengths - prefixes).argmin())
        raise LayoutError(
            f"a prefix of {prefixes[at]} tokens does not fit every row: row {rows[at]} has {lengths[at]} tokens"
        )
    groups_of_row = np.bincount(rows)
    if groups_of_row.max() > 1:
        raise LayoutError(f"row {groups_of_row.argmax()} is in two groups; a row shares one prefix")


def plan_suffix(
    seq_lens: Sequence[int] | npt.NDArray[np.int64],
    prefix: PrefixPlan,
    capacity: int,
    *,
    granularity: int = 64,
    split_tokens: int = 0,
    likely_tokens: int = 0,
) -> SuffixPlan:
    """Cuts what every row reads alone into at most `capacity` chunks of one length, a multiple of `granularity`.

    `likely_tokens` is the chunk of the step before; it saves a search and changes no result.
    """
    lengths = np.asarray(seq_lens, np.int64) - prefix.row_prefix
    if lengths.min(initial=0) < 0:
        raise LayoutError(f"row {int(lengths.argmin())} is {-int(lengths.min())} tokens shorter than its prefix")
    chunk = split_tokens or _chunk_tokens(lengths, capacity, granularity, likely_tokens)
    splits = (lengths + (chunk - 1)) // chunk
    row_indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(splits, out=row_indptr[1:])
    total = int(row_indptr[-1])
    if total > capacity:
        raise LayoutError(f"{total} suffix chunks, room for {capacity}; raise max_batch or split_tokens")
    ends = np.cumsum(lengths) + prefix.packed_tokens
    starts = ends - lengths
    rows = np.repeat(np.arange(len(lengths)), splits)
    first = (np.arange(total) - row_indptr[rows]) * chunk
    items = np.empty((total, SUFFIX_ITEM_WIDTH), np.int32)
    items[:, 0] = rows
    items[:, 1] = starts[rows] + first
    items[:, 2] = np.minimum(chunk, lengths[rows] - first)
    items[:, 3] = ((splits == 1) & (prefix.row_tile < 0))[rows]
    copies = np.empty((len(lengths), COPY_WIDTH), np.int32)
    copies[:, 0] = np.arange(len(lengths))
    copies[:, 1] = prefix.row_prefix
    copies[:, 2] = lengths
    copies[:, 3] = starts
    if not lengths.all():
        copies = copies[lengths > 0]
    return SuffixPlan(items, row_indptr, copies, int(ends[-1]) if len(ends) else prefix.packed_tokens, chunk)


def _chunk_tokens(lengths: npt.NDArray[np.int64], capacity: int, granularity: int, likely_tokens: int) -> int:
    """The shortest chunk, in units of `granularity` and at least four of them, whose count fits `capacity`."""

    def fits(units: int) -> bool:
        chunk = units * granularity
        return int(((lengths + (chunk - 1)) // chunk).sum()) <= capacity

    low, high = 4, max(4, ceil_div(int(lengths.max(initial=0)), granularity))
    likely = likely_tokens // granularity
    if low < likely <= high:
        if fits(likely):
            high = likely
            if not fits(likely - 1):
                return likely * granularity
        else:
            low = likely + 1
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
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
