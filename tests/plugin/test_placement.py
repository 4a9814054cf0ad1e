"""Placement with a stand-in pool: who moves, who stays, what splits and evictions do to the record."""

import pytest
import torch

from prefixonce.plugin.placement import Placement
from prefixonce.step import Segment, SlotPiece


class Pool:
    def __init__(self, start=None):
        self.start, self.copies, self.freed, self.asked = start, [], [], []

    def take_run(self, tokens):
        self.asked.append(tokens)
        return self.start

    def copy(self, source, target):
        self.copies.append((source.tolist(), target.tolist()))

    def free(self, slots):
        self.freed += slots.tolist()


SCATTERED = torch.tensor([5, 3, 9, 20])


def test_a_scattered_node_is_copied_into_the_run_and_its_old_slots_are_freed():
    pool = Pool(start=100)
    placement = Placement(pool, min_run_tokens=4)
    slots = placement.place(7, SCATTERED)
    assert slots.tolist() == [100, 101, 102, 103]
    assert pool.copies == [([5, 3, 9, 20], [100, 101, 102, 103])]
    assert pool.freed == [5, 3, 9, 20]
    assert placement.piece(7, slots) == Segment(100, 4)
    assert placement.nodes == {("contiguous", "moved into a run"): 1}
    assert placement.tokens == {"contiguous": 4}


def test_a_node_that_is_a_run_already_is_left_alone():
    pool = Pool(start=100)
    placement = Placement(pool, min_run_tokens=4)
    slots = torch.arange(40, 44)
    assert placement.place(7, slots) is slots
    assert (pool.asked, pool.copies, pool.freed) == ([], [], [])
    assert placement.piece(7, slots) == Segment(40, 4)


def test_without_a_free_run_the_node_stays_paged_and_is_counted():
    pool = Pool(start=None)
    placement = Placement(pool, min_run_tokens=4)
    assert placement.place(7, SCATTERED) is SCATTERED
    assert pool.freed == []
    assert isinstance(placement.piece(7, SCATTERED), SlotPiece)
    assert placement.nodes == {("paged", "no free run is long enough"): 1}


def test_nothing_is_decided_for_a_node_that_can_still_be_split():
    placement = Placement(Pool(start=None), min_run_tokens=4)
    assert placement.place(7, SCATTERED, can_split=True) is None
    assert (list(placement.events), placement.nodes) == ([], {})


def test_a_short_node_never_asks_for_a_run():
    pool = Pool(start=100)
    placement = Placement(pool, min_run_tokens=5)
    assert placement.place(7, SCATTERED) is SCATTERED
    assert pool.asked == []
    assert placement.nodes == {("paged", "shorter than 5 tokens"): 1}


def test_both_halves_of_a_split_run_are_runs():
    placement = Placement(Pool(start=100), min_run_tokens=4)
    slots = placement.place(7, SCATTERED)
    placement.split(upper_id=8, upper_tokens=1, lower_id=7, lower_tokens=3)
    assert placement.piece(8, slots[:1]) == Segment(100, 1)
    assert placement.piece(7, slots[1:]) == Segment(101, 3)


def test_a_split_of_pages_stays_pages():
    placement = Placement(Pool(), min_run_tokens=4)
    placement.place(7, SCATTERED)
    placement.split(upper_id=8, upper_tokens=1, lower_id=7, lower_tokens=3)
    assert isinstance(placement.piece(8, SCATTERED[:1]), SlotPiece)
    assert placement.events[-1].layout == "paged"


@pytest.mark.parametrize("forget", [lambda placement: placement.evict(7, 4), lambda placement: placement.flush()])
def test_a_run_is_forgotten_with_its_node(forget):
    placement = Placement(Pool(start=100), min_run_tokens=4)
    placement.place(7, SCATTERED)
    forget(placement)
    assert isinstance(placement.piece(7, SCATTERED), SlotPiece)


def test_events_number_on_and_the_oldest_are_dropped():
    placement = Placement(Pool(), min_run_tokens=4)
    for node in range(300):
        placement.place(node, SCATTERED)
    state = placement.to_json(1000, [], [])
    assert len(state["events"]) == 512
    assert state["events_dropped"] == 600 - 512
    assert [event[0] for event in state["events"]] == list(range(88, 600))
    assert state["events"][-1][1:5] == ["place", 299, 4, "paged"]
