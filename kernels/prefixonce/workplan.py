"""Host planning: which thread block reads which keys for which queries. Integers and numpy only; no torch, no triton.

The prefix of a group is cut into *items*: one query tile, one KV head, one run of keys, one fp32 partial. Items are
dealt to a fixed number of thread blocks so that all finish together and the tiles that read the same keys run at the
same time. Everything a row reads alone is the *suffix*, cut into chunks of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixonce.dealing import Geometry as Geometry
from prefixonce.dealing import IntArray, ceil_div, deal
from prefixonce.errors import LayoutError
from prefixonce.prefixwork import COPY_WIDTH, PrefixSize, PrefixWork, cut_prefix, prefix_work
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup

PREFIX_ITEM_WIDTH = 8  # first member, query rows, KV head, first key, keys, first partial row, two of `words`
SUFFIX_ITEM_WIDTH = 4  # batch row, first key, keys, 1 if the row has no other partial

Rows = Sequence[int] | npt.NDArray[np.int64]


class CtaQueues(NamedTuple):
    """How thread blocks find their items: thread block c runs items `cta_indptr[c] .. cta_indptr[c + 1]`.

    In the words that kernels read, item i is line `word_of_item[i]`: the first of thread block c at c, all others
    behind. `blank_words` hold how lines end: word 6 is the line of the thread block's next item, word 7 of line c is c;
    -1 if there is none.
    """

    cta_indptr: IntArray
    word_of_item: npt.NDArray[np.int64]
    blank_words: IntArray

    @classmethod
    def of(cls, cta_indptr: IntArray) -> CtaQueues:
        counts, items = np.diff(cta_indptr), int(cta_indptr[-1])
        busy = np.flatnonzero(counts)
        is_first = np.zeros(items + 1, np.bool_)
        is_first[cta_indptr[busy]] = is_first[-1] = True
        line = np.full(items + 1, -1)
        line[:-1][is_first[:-1]] = busy
        line[~is_first] = len(counts) + np.arange(np.count_nonzero(~is_first))
        words = np.full((len(counts) + items - len(busy), PREFIX_ITEM_WIDTH), -1, np.int32)
        words[line[:-1], 6] = np.where(is_first[1:], -1, line[1:])
        words[busy, 7] = busy
        return cls(cta_indptr, line[:-1], words)


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """`items` [n, PREFIX_ITEM_WIDTH] in the order of the thread blocks that run them."""

    items: IntArray
    queues: CtaQueues

    @property
    def cta_indptr(self) -> IntArray:
        return self.queues.cta_indptr

    def words(self) -> IntArray:
        words = self.queues.blank_words.copy()
        words[self.queues.word_of_item, :6] = self.items[:, :6]
        return words


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """Query tile t and KV head h have `diff(source_indptr)[t * heads + h]` partials, one after the other.

    `row_tile` is t, or the number of tiles for rows without a shared prefix. The first query of batch row r and KV head
    h has its partials in rows row_first[r, h] + i * row_stride[r], i < row_sources[r, h]. `copies` are the slot lists
    that the gather items read; they fill the first `packed_tokens` of the packed indices.
    """

    dense: ItemList
    gather: ItemList
    group_rows: IntArray
    row_tile: npt.NDArray[np.int64]
    row_prefix: npt.NDArray[np.int64]
    row_first: IntArray
    row_sources: IntArray
    row_stride: IntArray
    source_indptr: IntArray
    copies: IntArray
    packed_tokens: int
    partial_rows: int


class _Dealt(NamedTuple):
    """Prefix work dealt to thread blocks, dense items first. `items` lack what depends on rows, `item_tile` is whose
    they are, `by_source` their order by (tile, head): partials to be merged are adjacent, whichever kernel makes them.
    `sources` [tiles + 1, heads] counts these. Tile t has the members of group `tile_group[t]` from `tile_begin[t]` on
    and reads `tile_tokens[t]`. The last of `sources` and `tile_tokens` is for rows without a tile."""

    tile_group: npt.NDArray[np.int64]
    tile_begin: npt.NDArray[np.int64]
    tile_tokens: npt.NDArray[np.int64]
    items: IntArray
    item_tile: npt.NDArray[np.int64]
    queues: tuple[CtaQueues, CtaQueues]
    by_source: npt.NDArray[np.int64]
    source_indptr: IntArray
    sources: IntArray


def shared_groups(step: DecodeStep, choice: Choice) -> list[tuple[PrefixGroup, Path]]:
    """The groups whose prefix is read once; all other rows read everything they own."""
    pairs = zip(step.groups, choice.paths, strict=True)
    return [(group, path) for group, path in pairs if path in (Path.CASCADE, Path.DENSE) and group.prefix_tokens]


def prefix_size(step: DecodeStep, choice: Choice, geometry: Geometry) -> PrefixSize:
    return _work(shared_groups(step, choice), geometry).size


def plan_prefix(step: DecodeStep, choice: Choice, geometry: Geometry, num_ctas: int) -> PrefixPlan:
    """Deals the shared prefixes of a step to `num_ctas` thread blocks."""
    shared = shared_groups(step, choice)
    return plan_rows(step.lengths, [group.rows for group, _ in shared], _work(shared, geometry), num_ctas)


def _work(shared: Sequence[tuple[PrefixGroup, Path]], geometry: Geometry) -> PrefixWork:
    tiles = tuple(ceil_div(len(group.rows), geometry.members_per_tile) for group, _ in shared)
    return prefix_work(
        tiles, tuple(cut_prefix(group.pieces, path, geometry.block_tokens) for group, path in shared), geometry
    )


@lru_cache(maxsize=64)
def _deal(work: PrefixWork, num_ctas: int) -> _Dealt:
    heads, tiles = work.geometry.num_kv_heads, work.size.tiles
    first_tile = np.cumsum(work.tiles) - work.tiles
    tile_group = np.repeat(np.arange(len(work.tiles)), work.tiles)
    tile_begin = (np.arange(tiles) - first_tile[tile_group]) * work.geometry.members_per_tile
    dealt = [deal(loads, work.geometry, num_ctas) for loads in work.loads]
    owner = np.concatenate([owners[each.load] for owners, each in zip(work.owners, dealt, strict=True)])
    parts = np.concatenate([each.parts for each in dealt])
    items = np.zeros((len(parts), PREFIX_ITEM_WIDTH), np.int32)
    items[:, 2:5] = parts[:, 1:]
    item_tile = first_tile[owner] + parts[:, 0]
    unit = item_tile * heads + parts[:, 1]
    by_source = np.argsort(unit, kind="stable")
    source_indptr = np.searchsorted(unit[by_source], np.arange(tiles * heads + 1)).astype(np.int32)
    sources = np.zeros((tiles + 1, heads), np.int32)
    sources[:-1] = np.diff(source_indptr).reshape(tiles, heads)
    queues = (CtaQueues.of(dealt[0].cta_indptr), CtaQueues.of(dealt[1].cta_indptr))
    return _Dealt(
        tile_group,
        tile_begin,
        np.append(work.tokens[tile_group], 0),
        items,
        item_tile,
        queues,
        by_source,
        source_indptr,
        sources,
    )


def plan_rows(
    lengths: npt.NDArray[np.int64], groups: Sequence[Sequence[int]], work: PrefixWork, num_ctas: int
) -> PrefixPlan:
    """`groups` are the batch rows of each, `lengths` [batch] those of all rows, with or without a group."""
    geometry, batch = work.geometry, len(lengths)
    heads, per_tile, gqa_group = geometry.num_kv_heads, geometry.members_per_tile, geometry.gqa_group
    dealt = _deal(work, num_ctas)
    counts = np.fromiter(map(len, groups), np.int64, len(groups))
    rows = np.fromiter(chain.from_iterable(groups), np.int32, int(counts.sum()))
    if rows.max(initial=-1) >= batch:
        raise LayoutError(f"row {rows.max()} is in a group; the step has {batch} rows")
    # Of every tile; one more, of nobody, for rows without a group.
    nobody = work.size.tiles
    members = np.minimum(per_tile, counts.take(dealt.tile_group) - dealt.tile_begin)
    first_member = np.cumsum(members) - members
    queries = np.zeros(nobody + 1, np.int32)
    queries[:-1] = members * gqa_group
    # Of every row.
    member_tile = np.repeat(np.arange(nobody), members)
    tile = np.full(batch, nobody)
    tile[rows] = member_tile
    query = np.zeros(batch, np.int32)
    query[rows] = (np.arange(len(rows)) - first_member.take(member_tile)) * gqa_group
    row_prefix = dealt.tile_tokens.take(tile)
    _check_rows(lengths, row_prefix, rows, nobody_rows=int(np.count_nonzero(tile == nobody)))
    # Of every item.
    items = dealt.items.copy()
    items[:, 0] = first_member.take(dealt.item_tile)
    items[:, 1] = queries.take(dealt.item_tile)
    partials = items[:, 1].take(dealt.by_source)
    ends = np.cumsum(partials)
    starts = ends - partials
    items[dealt.by_source, 5] = starts
    first = np.zeros((nobody + 1, heads), np.int32)
    first[:-1] = starts.take(dealt.source_indptr[:-1]).reshape(nobody, heads)
    copies = work.copies.copy()
    copies[:, 0] = rows.take((np.cumsum(counts) - counts).take(work.copy_owners))
    dense_items = len(dealt.queues[0].word_of_item)
    return PrefixPlan(
        dense=ItemList(items[:dense_items], dealt.queues[0]),
        gather=ItemList(items[dense_items:], dealt.queues[1]),
        group_rows=rows,
        row_tile=tile,
        row_prefix=row_prefix,
        row_first=first.take(tile, axis=0) + query[:, None],
        row_sources=dealt.sources.take(tile, axis=0),
        row_stride=queries.take(tile),
        source_indptr=dealt.source_indptr,
        copies=copies,
        packed_tokens=work.packed_tokens,
        partial_rows=int(ends[-1]) if len(ends) else 0,
    )


def _check_rows(
    lengths: npt.NDArray[np.int64], row_prefix: npt.NDArray[np.int64], rows: IntArray, *, nobody_rows: int
) -> None:
    if len(rows) + nobody_rows > len(lengths):
        raise LayoutError(f"row {np.bincount(rows).argmax()} is in two groups; a row shares one prefix")
    missing = row_prefix - lengths
    if missing.max(initial=0) > 0:
        at = int(missing.argmax())
        raise LayoutError(
            f"a prefix of {row_prefix[at]} tokens does not fit every row: row {at} has {lengths[at]} tokens"
        )


class _SuffixShape(NamedTuple):
    """What lasts of a suffix plan while rows grow within their chunks. `items` and `copies` lack what grows."""

    chunk_tokens: int
    made_of: tuple[bytes, bytes]
    row_indptr: IntArray
    items: IntArray
    item_row: npt.NDArray[np.int64]
    item_first: npt.NDArray[np.int64]
    copies: IntArray
    whole_rows: int

    @classmethod
    def of(
        cls,
        row_prefix: npt.NDArray[np.int64],
        chunks: npt.NDArray[np.int64],
        chunk_tokens: int,
        before: _SuffixShape | None,
    ) -> _SuffixShape:
        made_of = (row_prefix.tobytes(), chunks.tobytes())
        if before is not None and (before.chunk_tokens, before.made_of) == (chunk_tokens, made_of):
            return before
        row_indptr = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(chunks, out=row_indptr[1:])
        row = np.repeat(np.arange(len(chunks)), chunks)
        is_whole = (chunks == 1) & (row_prefix == 0)
        items = np.zeros((len(row), SUFFIX_ITEM_WIDTH), np.int32)
        items[:, 0] = row
        items[:, 3] = is_whole[row]
        copies = np.zeros((len(chunks), COPY_WIDTH), np.int32)
        copies[:, 0] = np.arange(len(chunks))
        copies[:, 1] = row_prefix
        first = (np.arange(len(row)) - row_indptr[row]) * chunk_tokens
        whole_rows = int(np.count_nonzero(is_whole))
        return cls(chunk_tokens, made_of, row_indptr, items, row, first, copies, whole_rows)


@dataclass(frozen=True, slots=True, eq=False)
class SuffixPlan:
    """`items` [n, SUFFIX_ITEM_WIDTH] with those of row r at `row_indptr[r] .. row_indptr[r + 1]`."""

    items: IntArray
    copies: IntArray
    packed_tokens: int
    shape: _SuffixShape

    @property
    def row_indptr(self) -> IntArray:
        return self.shape.row_indptr

    @property
    def chunk_tokens(self) -> int:
        return self.shape.chunk_tokens

    @property
    def whole_rows(self) -> int:
        """Rows whose only partial is one item."""
        return self.shape.whole_rows


def plan_suffix(
    seq_lens: Rows,
    prefix: PrefixPlan,
    capacity: int,
    *,
    granularity: int = 64,
    split_tokens: int = 0,
    room_tokens: int = 0,
    before: SuffixPlan | None = None,
) -> SuffixPlan:
    """Cuts what every row reads alone into at most `capacity` chunks of one length, a multiple of `granularity`.

    Behind the slots of every row `room_tokens` more are left free. `before` is the plan of the step before; it saves
    work and changes no result.
    """
    own = np.asarray(seq_lens, np.int64) - prefix.row_prefix
    if own.min(initial=0) < 0:
        raise LayoutError(f"row {int(own.argmin())} is {-int(own.min())} tokens shorter than its prefix")
    chunk = split_tokens or _chunk_tokens(own, capacity, granularity, before.chunk_tokens if before else 0)
    chunks = (own + (chunk - 1)) // chunk
    shape = _SuffixShape.of(prefix.row_prefix, chunks, chunk, before.shape if before else None)
    if len(shape.items) > capacity:
        raise LayoutError(f"{len(shape.items)} suffix chunks, room for {capacity}; raise max_batch or split_tokens")
    ends = np.cumsum(own + room_tokens) + prefix.packed_tokens
    starts = ends - (own + room_tokens)
    items = shape.items.copy()
    items[:, 1] = starts.take(shape.item_row) + shape.item_first
    items[:, 2] = np.minimum(chunk, own.take(shape.item_row) - shape.item_first)
    copies = shape.copies.copy()
    copies[:, 2] = own
    copies[:, 3] = starts
    if not chunks.all():
        copies = copies[chunks > 0]
    return SuffixPlan(items, copies, int(ends[-1]) if len(ends) else prefix.packed_tokens, shape)


def _chunk_tokens(own: npt.NDArray[np.int64], capacity: int, granularity: int, likely_tokens: int) -> int:
    """The shortest chunk, in units of `granularity` and at least four of them, whose count fits `capacity`."""

    def fits(units: int) -> bool:
        chunk = units * granularity
        return int(((own + (chunk - 1)) // chunk).sum()) <= capacity

    low, likely = 4, likely_tokens // granularity
    if likely == low and fits(low):
        return low * granularity
    high = max(low, ceil_div(int(own.max(initial=0)), granularity))
    if low < likely <= high:
        if not fits(likely):
            low = likely + 1
        elif not fits(likely - 1):
            return likely * granularity
        else:
            high = likely - 1
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low * granularity
