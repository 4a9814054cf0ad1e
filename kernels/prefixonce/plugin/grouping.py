"""Which running requests share which prefix: from the chains of radix nodes above them to groups of batch rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import compress, count, filterfalse
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixonce.step import Piece, PrefixGroup, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One radix node on a request's path. `end_tokens` is the depth of its end, counted from the root."""

    node_id: int
    end_tokens: int
    piece: Piece


Chain = tuple[Link, ...]
Users = Mapping[int, Sized]
"""Of every node: the rows that pass through it."""
_BLOCK_ROWS = 32  # compared at once, which is many times faster than row by row
Request = TypeVar("Request", bound=Hashable)


def group_rows(chains: Sequence[Chain]) -> tuple[PrefixGroup, ...]:
    """Partitions batch rows (one chain per row, root first) so that the most prefix tokens are read only once."""
    return RunningRows(chains.__getitem__).groups_of(range(len(chains)))


class RunningRows(Generic[Request]):
    """`groups_of` is a function of the chains alone, whatever came before; what is kept only saves time.

    `chain_of` reads a request's path, root first. Its answer is kept until it is forgotten or the request runs no more.
    Python looks at the rows that differ from the batch before and at the groups, numpy at all other rows; a batch that
    keeps the order of the one before, with new rows behind, differs least.
    """

    def __init__(self, chain_of: Callable[[Request], Chain]) -> None:
        self._chain_of = chain_of
        self.clear()

    def clear(self) -> None:
        """Nothing that was read holds any more."""
        # Another object as soon as rows, their order or their chains change.
        self.rows_id: object = object()
        self._rows: list[Request] = []
        self._chains: dict[Request, Chain] = {}
        self._users: dict[int, dict[Request, None]] = {}  # of every node: who passes through it
        # Of the rows, in a fixed order: whose chain has to be read, or only their way found again.
        self._stale: dict[Request, None] = {}
        # The way of a row is its chain as far as another row passes too; way 0 is empty.
        self._ways: list[Chain] = [()]
        self._way_to: dict[int, int] = {}
        self._way_of_row = np.zeros(0, np.int64)
        self._groups: tuple[PrefixGroup, ...] = ()
        self._group_at: dict[Chain, PrefixGroup] = {}

    def forget(self, request: Request) -> None:
        """The request's path changed: it was cached, retracted, or has finished."""
        chain = self._chains.pop(request, None)
        if chain is None:
            return
        self._stale[request] = None
        for link in chain:
            users = self._users[link.node_id]
            del users[request]
            if len(users) == 1:
                self._stale.update(users)
            elif not users:
                del self._users[link.node_id]

    def forget_where(self, has_changed: Callable[[Request], bool]) -> None:
        for request in list(filter(has_changed, self._chains)):
            self.forget(request)

    def groups_of(self, requests: Sequence[Request]) -> tuple[PrefixGroup, ...]:
        """Groups of a batch with these rows, in order of their first rows; the same object if nothing changed."""
        rows = list(requests)
        if self._stale or rows != self._rows:
            self._exchange(rows)
            groups = self._group()
            if groups != self._groups:
                self._groups = groups
        return self._groups

    def _exchange(self, rows: list[Request]) -> None:
        """Forgets who left, reads the chains of who came, finds the way of everyone whom that concerns."""
        self.rows_id = object()
        gone = _rows_gone(self._rows, rows)
        kept = len(self._rows) - len(gone)
        came = rows[kept:]
        for request in filterfalse(set(came).__contains__, (self._rows[row] for row in gone)):
            self.forget(request)
            self._stale.pop(request, None)
        self._stale.update(dict.fromkeys(came))
        stays = np.ones(len(self._rows), np.bool_)
        stays[gone] = False
        self._way_of_row = np.concatenate([self._way_of_row[stays], np.zeros(len(came), np.int64)])
        self._rows = rows
        for request in list(filterfalse(self._chains.__contains__, self._stale)):
            self._admit(request)
        row_of = dict(zip(came, count(kept), strict=False))
        if len(row_of) < len(self._stale):
            row_of = dict(zip(rows, count(), strict=False))
        for request in self._stale:
            self._way_of_row[row_of[request]] = self._find_way(self._chains[request])
        self._stale.clear()

    def _admit(self, request: Request) -> None:
        chain = self._chains[request] = self._chain_of(request)
        for link in chain:
            users = self._users.setdefault(link.node_id, {})
            if len(users) == 1:
                self._stale.update(users)
            users[request] = None

    def _find_way(self, chain: Chain) -> int:
        depth = 0
        for link in chain:
            if len(self._users[link.node_id]) < 2:
                break
            depth += 1
        if not depth:
            return 0
        way = self._way_to.setdefault(chain[depth - 1].node_id, len(self._ways))
        if way == len(self._ways):
            self._ways.append(())
        self._ways[way] = chain[:depth]
        return way

    def _group(self) -> tuple[PrefixGroup, ...]:
        counts = np.bincount(self._way_of_row, minlength=len(self._ways))
        if not counts[1:].all():
            counts = self._drop_unused_ways(counts)
        levels = _best_levels(self._ways, counts.tolist(), self._users)
        number_at = {level: number for number, level in enumerate(dict.fromkeys(filter(None, levels)))}
        nobody = number_at[()] = len(number_at)  # sorted behind all groups
        number_of_way = np.fromiter(map(number_at.__getitem__, levels), np.int16, len(levels))
        numbers = number_of_way.take(self._way_of_row)
        ends = np.cumsum(np.bincount(numbers, minlength=nobody + 1)).tolist()
        rows = np.argsort(numbers, kind="stable").tolist()
        del number_at[()]
        known, self._group_at = self._group_at, {}
        begin = 0
        for level, end in zip(number_at, ends, strict=False):
            self._group_at[level] = _group_of(level, tuple(rows[begin:end]), known.get(level))
            begin = end
        return tuple(sorted(self._group_at.values(), key=lambda group: group.rows[0]))

    def _drop_unused_ways(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers the ways anew; returns their counts."""
        is_used = counts > 0
        is_used[0] = True
        self._way_of_row = (np.cumsum(is_used) - 1).take(self._way_of_row)
        self._ways = list(compress(self._ways, is_used))
        self._way_to = {way[-1].node_id: number for number, way in enumerate(self._ways) if way}
        return counts[is_used]


def _rows_gone(before: Sequence[object], now: Sequence[object]) -> list[int]:
    """The rows of `before` without which it is the beginning of `now`."""
    gone: list[int] = []
    for first in range(0, len(before), _BLOCK_ROWS):
        end, shift = min(first + _BLOCK_ROWS, len(before)), len(gone)
        if before[first:end] == now[first - shift : end - shift]:
            continue
        at = first - shift
        for row, request in enumerate(before[first:end], first):
            if at < len(now) and request == now[at]:
                at += 1
            else:
                gone.append(row)
    return gone


def _group_of(level: Chain, rows: tuple[int, ...], known: PrefixGroup | None) -> PrefixGroup:
    """`known` is the group that was at this level before."""
    if known is not None and known.rows == rows:
        return known
    pieces = known.pieces if known is not None else _pieces_of(level)
    return PrefixGroup(rows, level[-1].end_tokens, pieces, level[-1].node_id)


@dataclass(slots=True, eq=False)
class _Candidate:
    """A node whose rows are worth considering as one group: at least two, and more than any node below it has."""

    chain: Chain
    above: _Candidate | None
    rows: int = 0  # those that share nothing deeper
    below: list[_Candidate] = field(default_factory=list)
    # best_tokens[i]: most tokens that rows at or below read for free when ancestor i is the deepest one opened.
    best_tokens: list[int] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)

    @property
    def depth_tokens(self) -> int:
        return self.chain[-1].end_tokens


def _best_levels(ways: Sequence[Chain], rows: Sequence[int], users: Users) -> list[Chain]:
    """Down to where the rows of every way should share; () is not at all. `rows` are how many a way has.

    A row joins one ancestor level. A group of r rows over p tokens saves (r - 1) x p; the sum is maximal: opening a
    node costs its depth, every row gains the depth of its deepest opened ancestor, solved bottom-up over the tree.
    """
    ways_below: dict[int, list[int]] = {}
    for number, way in enumerate(ways):
        if way:
            ways_below.setdefault(way[0].node_id, []).append(number)
    levels = list(ways)
    for numbers in ways_below.values():
        if len(numbers) > 1:  # who has a tree for themselves share all they can
            chosen = _solve_tree([(ways[number], rows[number]) for number in numbers], users)
            for number, level in zip(numbers, chosen, strict=True):
                levels[number] = level
    return levels


def _solve_tree(ways: Iterable[tuple[Chain, int]], users: Users) -> list[Chain]:
    found: dict[int, _Candidate] = {}
    ends = [_enter(chain, rows, users, found) for chain, rows in ways]
    candidates = list(found.values())  # every node after the one above it
    for node in reversed(candidates):
        _solve(node)
    deepest: dict[int, tuple[int, Chain]] = {}
    for node in candidates:
        inherited, chain = deepest[id(node.above)] if node.above else (0, ())
        if node.opens[inherited]:
            inherited, chain = len(node.best_tokens), node.chain
        deepest[id(node)] = (inherited, chain)
    return [deepest[id(end)][1] if end is not None else () for end in ends]


def _enter(chain: Chain, rows: int, users: Users, found: dict[int, _Candidate]) -> _Candidate | None:
    above = None
    for depth, link in enumerate(chain):
        # A node below with the same rows saves more. (A row that ends here makes the counts differ.)
        if depth + 1 < len(chain) and len(users[chain[depth + 1].node_id]) == len(users[link.node_id]):
            continue
        node = found.get(link.node_id)
        if node is None:
            node = found[link.node_id] = _Candidate(chain[: depth + 1], above)
            if above is not None:
                above.below.append(node)
        above = node
    if above is not None:
        above.rows += rows
    return above


def _solve(node: _Candidate) -> None:
    depths = [0]
    path = []
    above = node.above
    while above is not None:
        path.append(above.depth_tokens)
        above = above.above
    depths.extend(reversed(path))
    rows, own = node.rows, node.depth_tokens
    opened = (rows - 1) * own + sum(child.best_tokens[-1] for child in node.below)
    for i, depth in enumerate(depths):
        closed = rows * depth + sum(child.best_tokens[i] for child in node.below)
        node.opens.append(opened > closed)
        node.best_tokens.append(max(opened, closed))


def _pieces_of(chain: Chain) -> tuple[Piece, ...]:
    """Where the chain's K/V lies; runs that touch become one."""
    pieces: list[Piece] = []
    for link in chain:
        last = pieces[-1] if pieces else None
        piece = link.piece
        if (
            isinstance(last, Segment)
            and isinstance(piece, Segment)
            and piece.start_slot == last.start_slot + last.length_tokens
        ):
            pieces[-1] = Segment(last.start_slot, last.length_tokens + piece.length_tokens)
        else:
            pieces.append(piece)
    return tuple(pieces)
