"""A picture of the KV pool: consecutive slots that are free, belong to a prefix run, or hold loose pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prefixonce.layout import Run

# A fragmented pool of a million slots would be a million entries; free gaps too short to see are drawn as pages.
_MAX_RUNS = 4096


class PrefixRun(NamedTuple):
    run: Run
    node_id: int
    users: int


class PoolRun(NamedTuple):
    """kind: prefix-run, pages or free; slots from `start_slot`."""

    start_slot: int
    length: int
    kind: str
    node_id: int | None = None
    users: int | None = None


def draw(slots: Run, free: Sequence[Run], prefixes: Iterable[PrefixRun]) -> list[PoolRun]:
    """Covers `slots` without gaps; `free` is ascending and overlaps no prefix. Whatever is neither is `pages`."""
    runs = [PoolRun(p.run.start, p.run.length, "prefix-run", p.node_id, p.users) for p in prefixes]
    shortest_free = 1
    while True:
        kept = [PoolRun(run.start, run.length, "free") for run in free if run.length >= shortest_free]
        picture = list(_fill(slots, sorted(runs + kept)))
        if len(picture) <= _MAX_RUNS or not kept:
            return picture
        shortest_free *= 2


def _fill(slots: Run, runs: Iterable[PoolRun]) -> Iterator[PoolRun]:
    at = slots.start
    for run in runs:
        if run.start_slot > at:
            yield PoolRun(at, run.start_slot - at, "pages")
        yield run
        at = run.start_slot + run.length
    if at < slots.end:
        yield PoolRun(at, slots.end - at, "pages")
