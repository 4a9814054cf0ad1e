"""Grouping against brute force over every assignment of rows to ancestor levels."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixonce.plugin.grouping import Link, RunningRows, group_rows
from prefixonce.step import Segment, SlotPiece


def link(node_id, start, end, slot=None):
    piece = SlotPiece(torch.arange(start, end), end - start) if slot is None else Segment(slot, end - start)
    return Link(node_id, end, piece)


@st.composite
def batches(draw):
    """Up to six rows over a random tree; node i hangs below a node with a smaller number, or below the root."""
    count = draw(st.integers(1, 6))
    chains = {None: ()}
    for node in range(count):
        above = draw(st.sampled_from([None, *range(node)]))
        start = chains[above][-1].end_tokens if chains[above] else 0
        chains[node] = (*chains[above], link(node, start, start + draw(st.integers(1, 9))))
    ends = st.sampled_from([None, *range(count)])
    return [chains[end] for end in draw(st.lists(ends, min_size=1, max_size=6))]


def saved(groups):
    return sum((len(rows) - 1) * tokens for rows, tokens in groups)


def best_by_brute_force(chains):
    levels = [[None, *chain] for chain in chains]
    best = 0
    for choice in itertools.product(*levels):
        members = {}
        for picked in choice:
            if picked is not None:
                members.setdefault(picked.node_id, [0, picked.end_tokens])[0] += 1
        best = max(best, sum((rows - 1) * tokens for rows, tokens in members.values()))
    return best


@settings(max_examples=150)
@given(batches())
def test_no_assignment_saves_more_tokens(chains):
    groups = group_rows(chains)
    assert saved((group.rows, group.prefix_tokens) for group in groups) == best_by_brute_force(chains)


@given(batches())
def test_groups_are_disjoint_real_prefixes_of_at_least_two_rows(chains):
    seen = set()
    for group in group_rows(chains):
        assert len(group.rows) >= 2
        assert not seen & set(group.rows)
        assert list(group.rows) == sorted(group.rows)
        seen |= set(group.rows)
        for row in group.rows:
            assert (group.node_id, group.prefix_tokens) in {(at.node_id, at.end_tokens) for at in chains[row]}


@settings(max_examples=150)
@given(st.data())
def test_what_is_kept_from_step_to_step_changes_no_group(data):
    """Requests come, go, change places and are cached again (their path changes); every step equals a fresh start."""
    chains = dict(enumerate(data.draw(batches())))
    rows = RunningRows(chains.__getitem__)
    for _ in range(data.draw(st.integers(1, 6))):
        fresh = data.draw(st.lists(st.sampled_from(sorted(chains)), unique=True))
        for request in data.draw(st.lists(st.sampled_from(sorted(chains)), max_size=3)):
            chains[request] = data.draw(st.sampled_from(sorted(chains.values(), key=len)))
            rows.forget(request)
        was_known, before = not rows._stale and rows._rows == fresh, rows.rows_id
        kept = rows.groups_of(fresh)
        assert (rows.rows_id is before) == was_known
        assert kept == group_rows([chains[request] for request in fresh])
        assert rows.groups_of(list(fresh)) is kept


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_many_rows_that_keep_their_order_group_like_a_fresh_start(seed):
    """Rows leave in the middle and come behind, some of those that stay are cached again; blocks of rows stay equal."""
    draw = random.Random(seed)
    prefixes = [(link(node, 0, 100 + node),) for node in range(12)]
    prefixes += [(*prefixes[0], link(20 + node, 100, 130 + node)) for node in range(4)]
    ids, chains = itertools.count(100), {}

    def cache(request):
        chains[request] = (*draw.choice(prefixes), link(next(ids), 500, 501))
        return request

    batch = [cache(request) for request in range(150)]
    rows = RunningRows(chains.__getitem__)
    for _ in range(4):
        assert rows.groups_of(batch) == group_rows([chains[request] for request in batch])
        leaving = draw.sample(batch, draw.choice([0, 1, 3, len(batch) // 2]))
        batch = [request for request in batch if request not in leaving]
        batch += [cache(len(chains)) for _ in range(draw.choice([0, 1, 40]))]
        for request in draw.sample(batch, draw.choice([0, 2])):
            cache(request)
            rows.forget(request)


def test_the_batch_is_another_one_as_soon_as_a_row_is():
    """Groups need not show it: who came may share just what another who left did."""
    prefix = link(1, 0, 301)
    rows = RunningRows(lambda request: (prefix, link(10 + request, 301, 303)))
    groups = rows.groups_of([0, 1, 2])
    first = rows.rows_id
    assert rows.groups_of([0, 1, 2]) is groups
    assert rows.rows_id is first
    assert rows.groups_of([0, 1, 3]) is groups
    second = rows.rows_id
    assert second is not first
    rows.groups_of([0, 3, 1])
    third = rows.rows_id
    assert third is not second
    rows.forget(3)  # cached again: its tokens may lie elsewhere
    rows.groups_of([0, 3, 1])
    assert rows.rows_id is not third


def test_only_what_changed_is_read_again():
    prefix = link(1, 0, 301)
    chains = {row: (prefix, link(10 + row, 301, 303)) for row in range(40)}
    read = []
    rows = RunningRows(lambda request: read.append(request) or chains[request])
    rows.groups_of(range(32))
    assert read == list(range(32))
    read.clear()
    (group,) = rows.groups_of([*range(5), *range(6, 33)])
    assert read == [32]
    assert len(group.rows) == 32
    rows.forget_where(lambda request: request in (7, 9, 39))
    rows.groups_of(range(31))
    assert read == [32, 7, 9, 5]
    assert len(rows._users) == len({link.node_id for row in range(31) for link in chains[row]}), "who left is forgotten"


def test_private_leaves_group_at_their_common_ancestor():
    prefix = link(1, 0, 301)
    chains = [(prefix, link(10 + row, 301, 303)) for row in range(8)]
    (group,) = group_rows(chains)
    assert group.rows == tuple(range(8))
    assert group.prefix_tokens == 301
    assert group.node_id == 1


def test_two_prompts_and_a_loner_make_two_groups():
    a, b = link(1, 0, 100), link(2, 0, 40)
    chains = [(a,), (b,), (link(3, 0, 70),), (a,), (b,)]
    assert [(g.rows, g.prefix_tokens) for g in group_rows(chains)] == [((0, 3), 100), ((1, 4), 40)]


def test_deeper_groups_win_when_they_save_more():
    root = link(1, 0, 10)
    left, right = link(2, 10, 500), link(3, 10, 500)
    chains = [(root, left), (root, left), (root, right), (root, right)]
    assert [(g.rows, g.prefix_tokens) for g in group_rows(chains)] == [((0, 1), 500), ((2, 3), 500)]


def test_a_long_common_root_beats_short_branches():
    root = link(1, 0, 500)
    left, right = link(2, 500, 510), link(3, 500, 510)
    chains = [(root, left), (root, left), (root, right), (root, right)]
    assert [(g.rows, g.prefix_tokens) for g in group_rows(chains)] == [((0, 1, 2, 3), 500)]


def test_runs_that_touch_become_one_segment():
    chain = (link(1, 0, 64, slot=100), link(2, 64, 96, slot=164), link(3, 96, 128, slot=500))
    (group,) = group_rows([chain, chain])
    assert group.pieces == (Segment(100, 96), Segment(500, 32))
    assert group.is_contiguous


def test_paged_nodes_stay_slot_lists_in_token_order():
    chain = (link(1, 0, 4), link(2, 4, 6, slot=50))
    (group,) = group_rows([chain, chain])
    assert torch.equal(group.pieces[0].slots, torch.arange(4))
    assert group.pieces[1] == Segment(50, 2)
    assert group.contiguous_tokens == 2


@pytest.mark.parametrize("chains", [[], [()], [(), ()], [(link(1, 0, 9),), (link(2, 0, 9),)]])
def test_nothing_shared_is_no_group(chains):
    assert group_rows(chains) == ()


def test_a_deep_caterpillar_is_solved_without_recursion():
    chain, chains = (), []
    for node in range(1200):
        chain = (*chain, link(node, node, node + 1))
        if node % 4 == 0:
            chains.append(chain)
    groups = group_rows(chains)
    assert sum(len(group.rows) for group in groups) > 200
