"""The asymmetric KV layout as integer arithmetic: free runs of pages beside loose pages, in one pool."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixonce.errors import LayoutError


class Run(NamedTuple):
    """`length` consecutive units (slots or pages) from `start`."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class FreeRuns:
    """Free units known to lie in runs, ordered by (length, start); best fit keeps the long runs whole.

    Every answer is a function of the calls made so far, so tensor-parallel ranks that make the same calls agree.
    Finding is O(log runs); taking moves O(runs) list entries.
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._by_length: list[tuple[int, int]] = sorted((run.length, run.start) for run in runs)
        self.total = sum(length for length, _ in self._by_length)

    def __iter__(self) -> Iterator[Run]:
        """Runs in order of their start."""
        return iter(sorted(Run(start, length) for length, start in self._by_length))

    def take(self, length: int) -> int | None:
        """Removes `length` consecutive units from the shortest run that has them; returns their start."""
        if length < 1:
            raise LayoutError(f"a run of {length} units was asked for; at least 1 is allowed")
        at = bisect_left(self._by_length, (length, -1))
        if at == len(self._by_length):
            return None
        have, start = self._by_length.pop(at)
        self.total -= length
        if have > length:
            insort(self._by_length, (have - length, start + length))
        return start

    def drain(self, length: int) -> list[Run]:
        """Removes up to `length` units wherever they hurt least: whole shortest runs first, the last one cut."""
        taken = []
        while length > 0 and self._by_length:
            have, start = self._by_length.pop(0)
            part = min(have, length)
            taken.append(Run(start, part))
            self.total -= part
            length -= part
            if have > part:
                insort(self._by_length, (have - part, start + part))
        return taken


def run_start(slots: Sequence[int]) -> int | None:
    """The first slot if `slots` are consecutive and ascending, else None; an empty sequence is no run."""
    if not slots:
        return None
    start = slots[0]
    if slots[-1] - start != len(slots) - 1:
        return None
    return start if all(slot == start + i for i, slot in enumerate(slots)) else None


def oldest_window(age: NDArray[np.int64], length: int, *, blocked: int) -> Run | None:
    """The first `length` consecutive units whose largest `age` is as small as it can be; None if `blocked` ones are
    everywhere. An age is a rank of the last use: 0 for free units, larger for what was used later."""
    known = np.unique(age[age < blocked])
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        if _first_run(age <= known[middle], length) is None:
            low = middle + 1
        else:
            high = middle
    return _first_run(age <= known[low], length) if low < len(known) else None


def _first_run(mask: NDArray[np.bool_], length: int) -> Run | None:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    long_enough = np.flatnonzero(edges[:, 1] - edges[:, 0] >= length)
    return Run(int(edges[long_enough[0], 0]), length) if len(long_enough) else None
