"""Which running requests share which prefix: from the chains of radix nodes above them to groups of batch rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Generic, TypeVar

import numpy as np

from prefixonce.step import Piece, PrefixGroup, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One radix node on a request's path. `end_tokens` is the depth of its end, counted from the root."""

    node_id: int
    end_tokens: int
    piece: Piece


Chain = tuple[Link, ...]
Request = TypeVar("Request", bound=Hashable)
_NOBODY = -1  # in place of a node id: the row shares nothing


def group_rows(chains: Sequence[Chain]) -> tuple[PrefixGroup, ...]:
    """Partitions batch rows (one chain per row, root first) so that the most prefix tokens are read only once."""
    return RunningRows(chains.__getitem__).groups_of(range(len(chains)))


class RunningRows(Generic[Request]):
    """`groups_of` is a function of the chains alone, whatever came before; what is kept only saves time.

    `chain_of` reads a request's path, root first. Its answer is kept until it is forgotten or the request runs no more.
    """

    def __init__(self, chain_of: Callable[[Request], Chain]) -> None:
        self._chain_of = chain_of
        self.clear()

    def clear(self) -> None:
        """Nothing that was read holds any more."""
        self._chains: dict[Request, Chain] = {}
        self._users: Counter[int] = Counter()
        # What rows share at most: the deepest node of their chain that another row has too, and the way to it.
        self._tips: dict[Request, int] = {}
        self._ways: dict[int, Chain] = {}
        self._pieces: dict[Chain, tuple[Piece, ...]] = {}
        self._touched: dict[int, bool] = {}
        self._requests: Sequence[Request] = ()
        self._groups: tuple[PrefixGroup, ...] = ()
        self._is_current = True

    def forget(self, request: Request) -> None:
        """The request's path changed: it was cached, retracted, or has finished."""
        chain = self._chains.pop(request, None)
        if chain is not None:
            self._is_current = False
            del self._tips[request]
            self._count(chain, -1)

    def forget_where(self, has_changed: Callable[[Request], bool]) -> None:
        for request in list(filter(has_changed, self._chains)):
            self.forget(request)

    def groups_of(self, requests: Sequence[Request]) -> tuple[PrefixGroup, ...]:
        """Groups of a batch with these rows, in order of their first rows; the same object if nothing changed."""
        if self._is_current and requests == self._requests:
            return self._groups
        self._exchange(requests)
        self._groups = self._group(requests)
        self._requests, self._is_current = list(requests), True
        return self._groups

    def _exchange(self, requests: Sequence[Request]) -> None:
        """Forgets who left, reads the chains of who came."""
        came = list(filterfalse(self._chains.__contains__, requests))
        if len(self._chains) + len(came) > len(requests):
            for request in list(filterfalse(set(requests).__contains__, self._chains)):
                self.forget(request)
        for request in came:
            chain = self._chains[request] = self._chain_of(request)
            self._count(chain, 1)
        crossed = any(was_shared != (self._users[node] > 1) for node, was_shared in self._touched.items())
        for node in self._touched:
            if not self._users[node]:
                del self._users[node]
        self._touched.clear()
        for request in requests if crossed else came:
            way = _shared_part(self._chains[request], self._users)
            tip = way[-1].node_id if way else _NOBODY
            self._tips[request], self._ways[tip] = tip, way

    def _count(self, chain: Chain, rows: int) -> None:
        users, touched = self._users, self._touched
        for link in chain:
            node = link.node_id
            touched.setdefault(node, users[node] > 1)
            users[node] += rows

    def _group(self, requests: Sequence[Request]) -> tuple[PrefixGroup, ...]:
        tips = list(map(self._tips.__getitem__, requests))
        counts = Counter(tips)
        del counts[_NOBODY]
        self._ways = {tip: self._ways[tip] for tip in counts}
        levels = _best_levels(zip(self._ways.values(), counts.values(), strict=True), self._users)
        number_of_level = {level: number for number, level in enumerate(dict.fromkeys(filter(None, levels)))}
        self._pieces = {level: self._pieces.get(level) or _pieces_of(level) for level in number_of_level}
        if not number_of_level:
            return ()
        number_of_level[()] = len(number_of_level)  # sorted behind all groups
        number_of_tip = {tip: number_of_level[level] for tip, level in zip(counts, levels, strict=True)}
        number_of_tip[_NOBODY] = number_of_level[()]
        numbers = np.fromiter(map(number_of_tip.__getitem__, tips), np.int16, len(tips))
        ends = np.cumsum(np.bincount(numbers)).tolist()
        rows = np.argsort(numbers, kind="stable").tolist()
        groups = []
        begin = 0
        for (level, pieces), end in zip(self._pieces.items(), ends, strict=False):
            groups.append(PrefixGroup(tuple(rows[begin:end]), level[-1].end_tokens, pieces, level[-1].node_id))
            begin = end
        return tuple(sorted(groups, key=lambda group: group.rows[0]))


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


def _shared_part(chain: Chain, users: Mapping[int, int]) -> Chain:
    """The links that at least two rows pass through; `users` counts the rows of every node."""
    for depth, link in enumerate(chain):
        if users[link.node_id] < 2:
            return chain[:depth]
    return chain


def _best_levels(tips: Iterable[tuple[Chain, int]], users: Mapping[int, int]) -> list[Chain]:
    """For every (shared part, rows that have it): down to where those rows should share; () is not at all.

    A row joins one ancestor level. A group of r rows over p tokens saves (r - 1) x p; the sum is maximal: opening a
    node costs its depth, every row gains the depth of its deepest opened ancestor, solved bottom-up over the tree.
    """
    found: dict[int, _Candidate] = {}
    ends = [_enter(chain, rows, users, found) for chain, rows in tips]
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


def _enter(chain: Chain, rows: int, users: Mapping[int, int], found: dict[int, _Candidate]) -> _Candidate | None:
    above = None
    for depth, link in enumerate(chain):
        # A node below with the same rows saves more. (A row that ends here makes the counts differ.)
        if depth + 1 < len(chain) and users[chain[depth + 1].node_id] == users[link.node_id]:
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
