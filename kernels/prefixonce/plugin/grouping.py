"""Which running requests share which prefix: from the chains of radix nodes above them to groups of batch rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixonce.step import Piece, PrefixGroup, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One radix node on a request's path. `end_tokens` is the depth of its end, counted from the root."""

    node_id: int
    end_tokens: int
    piece: Piece


Chain = tuple[Link, ...]


@dataclass(slots=True, eq=False)
class _Candidate:
    """A node whose rows are worth considering as one group: at least two, and more than any node below it has."""

    chain: Chain
    above: _Candidate | None
    rows: list[int] = field(default_factory=list)
    below: list[_Candidate] = field(default_factory=list)
    # best_tokens[i]: most tokens that rows at or below read for free when ancestor i is the deepest one opened.
    best_tokens: list[int] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)

    @property
    def depth_tokens(self) -> int:
        return self.chain[-1].end_tokens


def group_rows(chains: Sequence[Chain]) -> tuple[PrefixGroup, ...]:
    """Partitions batch rows (one chain per row, root first) so that the most prefix tokens are read only once.

    A row joins one ancestor level. A group of r rows over p tokens saves (r - 1) x p; the sum is maximal: opening a
    node costs its depth, every row gains the depth of its deepest opened ancestor, solved bottom-up over the tree.
    """
    candidates = _candidates(chains)
    for node in reversed(candidates):
        _solve(node)
    members: dict[int, tuple[Chain, list[int]]] = {}
    deepest_open: dict[int, tuple[int, Chain | None]] = {}
    for node in candidates:
        inherited, chain = deepest_open[id(node.above)] if node.above else (0, None)
        if node.opens[inherited]:
            inherited, chain = len(node.best_tokens), node.chain
        deepest_open[id(node)] = (inherited, chain)
        if chain is not None:
            members.setdefault(chain[-1].node_id, (chain, []))[1].extend(node.rows)
    groups = [_group(chain, rows) for chain, rows in members.values()]
    return tuple(sorted(groups, key=lambda group: group.rows))


def _candidates(chains: Sequence[Chain]) -> list[_Candidate]:
    """In an order that puts every node after the one above it."""
    users = Counter(link.node_id for chain in chains for link in chain)
    found: dict[int, _Candidate] = {}
    for row, chain in enumerate(chains):
        above = None
        for depth, link in enumerate(chain):
            count = users[link.node_id]
            if count < 2:
                break
            below = users[chain[depth + 1].node_id] if depth + 1 < len(chain) else 0
            # A node below with the same rows saves more. (A row that ends here makes the counts differ.)
            if below == count:
                continue
            node = found.get(link.node_id)
            if node is None:
                node = found[link.node_id] = _Candidate(chain[: depth + 1], above)
                if above is not None:
                    above.below.append(node)
            above = node
        if above is not None:
            above.rows.append(row)
    return list(found.values())


def _solve(node: _Candidate) -> None:
    depths = [0]
    path = []
    above = node.above
    while above is not None:
        path.append(above.depth_tokens)
        above = above.above
    depths.extend(reversed(path))
    rows, own = len(node.rows), node.depth_tokens
    opened = (rows - 1) * own + sum(child.best_tokens[-1] for child in node.below)
    for i, depth in enumerate(depths):
        closed = rows * depth + sum(child.best_tokens[i] for child in node.below)
        node.opens.append(opened > closed)
        node.best_tokens.append(max(opened, closed))


def _group(chain: Chain, rows: list[int]) -> PrefixGroup:
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
    return PrefixGroup(tuple(sorted(rows)), chain[-1].end_tokens, tuple(pieces), chain[-1].node_id)
