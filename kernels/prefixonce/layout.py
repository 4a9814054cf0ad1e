"""The asymmetric KV layout as integer arithmetic: free runs of pages beside loose pages, in one pool."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Free units as ascending runs that do not touch. Long runs are taken at the low end and loose units at the high
    end, so that what comes and goes unit by unit does not break up the places where long runs come and go.

    Every answer is a function of the calls made so far, so tensor-parallel ranks that make the same calls agree.
    """

    def __init__(self, is_free: NDArray[np.bool_]) -> None:
        """`is_free` [units]."""
        bounds = np.flatnonzero(np.diff(is_free, prepend=False, append=False))
        self._starts, self._ends = bounds[::2].copy(), bounds[1::2].copy()
        self.total = int(np.count_nonzero(is_free))

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self._starts.tolist(), (self._ends - self._starts).tolist())

    def mark(self, is_free: NDArray[np.bool_]) -> None:
        """Sets the entries of all units in the runs."""
        is_free[_units(self._starts, self._ends)] = True

    def take(self, length: int) -> int | None:
        """Removes `length` consecutive units from the lowest run that has them; returns their start."""
        if length < 1:
            raise LayoutError(f"a run of {length} units was asked for; at least 1 is allowed")
        long_enough = np.flatnonzero(self._ends - self._starts >= length)
        if not len(long_enough):
            return None
        at = long_enough[0]
        start = int(self._starts[at])
        self._starts[at] += length
        self.total -= length
        if self._starts[at] == self._ends[at]:
            self._starts, self._ends = np.delete(self._starts, at), np.delete(self._ends, at)
        return start

    def drain(self, length: int) -> NDArray[np.int64]:
        """Removes up to `length` units, the highest ones; returns them, ascending."""
        length = min(length, self.total)
        first = max(0, len(self._starts) - length)  # no run is empty, so these have enough
        starts, ends = self._starts[first:].copy(), self._ends[first:]
        above = np.cumsum((ends - starts)[::-1])[::-1] - (ends - starts)
        starts = np.maximum(starts, ends - np.maximum(length - above, 0))
        keeps = first + int(np.count_nonzero(starts == ends))
        taken = _units(starts, ends)
        self.total -= length
        is_cut = keeps < len(self._starts) and self._starts[keeps] < starts[keeps - first]
        self._starts, self._ends = self._starts[: keeps + is_cut], self._ends[: keeps + is_cut].copy()
        if is_cut:
            self._ends[keeps] = starts[keeps - first]
        return taken


def _units(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = ends - starts
    units: NDArray[np.int64] = np.arange(int(lengths.sum()))
    units += np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return units


def run_start(slots: NDArray[np.int64]) -> int | None:
    """The first slot if `slots` are consecutive and ascending, else None; no slots are no run."""
    if not slots.size or slots[-1] - slots[0] != slots.size - 1:
        return None
    return int(slots[0]) if (np.diff(slots) == 1).all() else None


def oldest_window(age: NDArray[np.int64], length: int, *, blocked: int) -> Run | None:
    """`length` consecutive units at an end of a stretch without `blocked` ones; None if none is long enough.

    Of all such ends the one whose largest `age` is smallest, then the lowest. Further inside, the window would leave
    two short stretches. An age is a rank of the last use: 0 for free units, larger for what was used later.
    """
    bounds = np.flatnonzero(np.diff(age < blocked, prepend=False, append=False))
    stretches = zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)
    starts = sorted({start for begin, end in stretches if end - begin >= length for start in (begin, end - length)})
    if not starts:
        return None
    return Run(min(starts, key=lambda start: int(age[start : start + length].max())), length)
