"""Free runs against a plain set of free units; contiguity of slot lists; windows of old units."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixonce.errors import LayoutError
from prefixonce.layout import FreeRuns, Run, oldest_window, run_start


@st.composite
def disjoint_runs(draw):
    runs, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), max_size=8)):
        runs.append(Run(at + gap, length))
        at += gap + length
    return runs


def free_runs(*runs):
    mask = np.zeros(max((run.end for run in runs), default=0), np.bool_)
    for run in runs:
        mask[run.start : run.end] = True
    return FreeRuns(mask)


def units(runs):
    return [unit for run in runs for unit in range(run.start, run.end)]


@given(disjoint_runs(), st.lists(st.tuples(st.booleans(), st.integers(1, 25)), max_size=12))
def test_taking_and_draining_never_lose_or_invent_a_unit(runs, calls):
    free = free_runs(*runs)
    owned = set(units(runs))
    for take, length in calls:
        longest = max((run.length for run in free), default=0)
        if take:
            start = free.take(length)
            assert (start is None) == (length > longest)
            got = [] if start is None else list(range(start, start + length))
        else:
            got = free.drain(length).tolist()
            assert got == sorted(owned)[-length:], "the highest"
        assert len(set(got)) == len(got)
        assert set(got) <= owned
        owned -= set(got)
        assert sorted(units(free)) == sorted(owned)
        assert free.total == len(owned)
        mask = np.zeros(300, np.bool_)
        free.mark(mask)
        assert np.flatnonzero(mask).tolist() == sorted(owned)


def test_a_run_is_taken_at_the_low_end():
    free = free_runs(Run(10, 20), Run(100, 50), Run(200, 20))
    assert free.take(15) == 10
    assert list(free) == [Run(25, 5), Run(100, 50), Run(200, 20)]
    assert free.take(50) == 100
    assert free.take(21) is None


def test_loose_units_are_taken_at_the_high_end():
    free = free_runs(Run(10, 20), Run(100, 50))
    assert free.drain(45).tolist() == list(range(105, 150))
    assert free.drain(15).tolist() == [*range(20, 30), *range(100, 105)]
    assert list(free) == [Run(10, 10)]


def test_a_run_of_nothing_is_refused():
    with pytest.raises(LayoutError, match="at least 1"):
        free_runs(Run(1, 4)).take(0)


@pytest.mark.parametrize(
    ("slots", "start"),
    [([], None), ([7], 7), ([7, 8, 9], 7), ([7, 9, 8, 10], None), ([7, 7, 9], None), ([9, 8, 7], None), ([7, 9], None)],
)
def test_run_start(slots, start):
    assert run_start(np.array(slots, np.int64)) == start


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 8))
def test_the_oldest_window_is_the_one_brute_force_finds(ages, length):
    """9 stands for blocked; a window has a blocked neighbour, or none, on one side at least."""
    padded = [9, *ages, 9]
    windows = {
        at: max(ages[at : at + length])
        for at in range(len(ages) - length + 1)
        if 9 in (padded[at], padded[at + length + 1])
    }
    best = min(windows.values(), default=9)
    found = oldest_window(np.array(ages), length, blocked=9)
    if best == 9:
        assert found is None
    else:
        assert found == Run(min(at for at, oldest in windows.items() if oldest == best), length)
