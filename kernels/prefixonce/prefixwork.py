"""Shared prefixes as the kernels read them, whatever rows share them: runs, slot lists, and loads to be dealt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixonce.dealing import Geometry, IntArray, Load, ceil_div
from prefixonce.step import Path, Piece, Segment

MAX_SEGMENTS = 4  # longer chains are read through slots, which bounds the partials of a row
COPY_WIDTH = 4  # batch row, first position, tokens, first packed index


@dataclass(frozen=True, slots=True)
class PrefixSize:
    """The prefix pass before it is dealt: query tiles, the fewest items, and key blocks summed over all items, from
    contiguous runs and through slot lists."""

    tiles: int
    items: int
    run_blocks: int
    slot_blocks: int


class PrefixCut(NamedTuple):
    """One shared prefix: contiguous runs as (slot, tokens), what is read through slots as (position, tokens).

    Of its `tokens`, `run_tokens` are contiguous if the path asks for runs.
    """

    tokens: int
    run_tokens: int
    runs: tuple[tuple[int, int], ...]
    loose: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixWork:
    """All shared prefixes of a step. `tiles` and `tokens` [groups]; `loads` and `owners` are what the dense and the
    gather kernel read and of which group it is; `copies` lack the batch row, which is the first of `copy_owners`."""

    geometry: Geometry
    size: PrefixSize
    tiles: NDArray[np.int64]
    tokens: NDArray[np.int64]
    loads: tuple[tuple[Load, ...], tuple[Load, ...]]
    owners: tuple[IntArray, IntArray]
    copies: IntArray
    copy_owners: IntArray
    packed_tokens: int


def cut_prefix(pieces: Sequence[Piece], path: Path, block_tokens: int) -> PrefixCut:
    """A run shorter than one block is read through slots; so are all but the longest runs of a long chain."""
    runs: list[tuple[int, int, int]] = []
    loose: list[tuple[int, int]] = []
    position = run_tokens = 0
    for piece in pieces:
        if path is Path.DENSE and isinstance(piece, Segment):
            run_tokens += piece.length_tokens
            if piece.length_tokens >= block_tokens:
                runs.append((piece.length_tokens, position, piece.start_slot))
            elif piece.length_tokens:
                loose.append((position, piece.length_tokens))
        elif piece.length_tokens:
            loose.append((position, piece.length_tokens))
        position += piece.length_tokens
    runs.sort(key=lambda run: (-run[0], run[1]))
    loose.extend((first, tokens) for tokens, first, _ in runs[MAX_SEGMENTS:])
    longest = tuple((slot, tokens) for tokens, _, slot in runs[:MAX_SEGMENTS])
    return PrefixCut(position, run_tokens, longest, _joined(sorted(loose)))


# Kept, because it stays as it is when requests come and go, as long as the tiles are as many.
@lru_cache(maxsize=64)
def prefix_work(tiles: tuple[int, ...], cuts: tuple[PrefixCut, ...], geometry: Geometry) -> PrefixWork:
    """`tiles` are the query tiles of every group, `cuts` what they read."""
    heads, block = geometry.num_kv_heads, geometry.block_tokens
    run_blocks = slot_blocks = packed = 0
    loads: tuple[list[Load], list[Load]] = ([], [])
    owners: tuple[list[int], list[int]] = ([], [])
    copies: list[tuple[int, int, int, int]] = []
    copy_owners: list[int] = []
    for group, (count, cut) in enumerate(zip(tiles, cuts, strict=True)):
        run_blocks += count * heads * ceil_div(cut.run_tokens, block)
        slot_blocks += count * heads * ceil_div(cut.tokens - cut.run_tokens, block)
        if cut.runs:
            loads[0].append(Load(count, cut.runs))
            owners[0].append(group)
        if cut.loose:
            start = packed
            for position, tokens in cut.loose:
                copies.append((-1, position, tokens, packed))
                copy_owners.append(group)
                packed += tokens
            loads[1].append(Load(count, ((start, packed - start),)))
            owners[1].append(group)
    return PrefixWork(
        geometry=geometry,
        size=PrefixSize(sum(tiles), sum(tiles) * heads, run_blocks, slot_blocks),
        tiles=np.asarray(tiles, np.int64),
        tokens=np.asarray([cut.tokens for cut in cuts], np.int64),
        loads=(tuple(loads[0]), tuple(loads[1])),
        owners=(np.asarray(owners[0], np.int32), np.asarray(owners[1], np.int32)),
        copies=np.asarray(copies, np.int32).reshape(-1, COPY_WIDTH),
        copy_owners=np.asarray(copy_owners, np.int32),
        packed_tokens=packed,
    )


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring (position, tokens) ranges as one."""
    joined: list[tuple[int, int]] = []
    for position, tokens in ranges:
        if joined and sum(joined[-1]) == position:
            joined[-1] = (joined[-1][0], joined[-1][1] + tokens)
        else:
            joined.append((position, tokens))
    return tuple(joined)
