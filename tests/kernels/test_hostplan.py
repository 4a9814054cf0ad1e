"""What the host keeps from step to step saves work and changes no plan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixonce.dealing import Geometry
from prefixonce.dispatch import Dispatcher, Limits
from prefixonce.errors import LayoutError
from prefixonce.hostplan import HostPlanner, Overlap
from prefixonce.limits import HeadSpec
from prefixonce.plugin.grouping import Link, RunningRows
from prefixonce.step import Choice, DecodeStep, Mode, Path, PrefixGroup, Segment, SlotPiece

HEADS = (8, 2, 64)
GEOMETRY = Geometry(num_kv_heads=2, gqa_group=4, num_ctas=16, tile_rows=32)
# One with a run and a loose end, one in a run, one loose; (), a request of its own.
PREFIXES = (
    (Link(1, 300, Segment(1000, 300)), Link(2, 340, SlotPiece(None, 40))),
    (Link(3, 700, Segment(5000, 700)),),
    (Link(4, 50, SlotPiece(None, 50)),),
    (),
)


class _WholeDevice(Overlap):
    """Gives the prefix all thread blocks, whatever the suffixes; the share of a pass is no function of one step."""

    def prefix_ctas(self, size, suffix_bytes, num_ctas):
        return num_ctas


def host_planner(overlap=None):
    return HostPlanner(HeadSpec(*HEADS), GEOMETRY, overlap or _WholeDevice(), max_tokens=0)


def words(plan):
    """Everything that goes to the device, and what is launched."""
    prefix, suffix = plan.prefix, plan.suffix
    arrays = [prefix.dense.words(), prefix.gather.words(), prefix.group_rows, prefix.row_first, prefix.row_sources]
    arrays += [prefix.row_stride, prefix.copies, suffix.items, suffix.row_indptr, suffix.copies]
    return [array.tolist() for array in arrays], plan.passes


class _Rank:
    """All that a rank keeps."""

    def __init__(self, chain_of):
        self.rows, self.dispatcher, self.host = (
            RunningRows(chain_of),
            Dispatcher(Limits(dense_m_eff=24)),
            host_planner(),
        )

    def plan(self, requests, lengths):
        step = DecodeStep(np.array(lengths), *HEADS, self.rows.groups_of(requests))
        return self.host.plan(step, self.dispatcher.choose(step, Mode.FULL, None), len(requests) + 1)


changes = st.lists(
    st.one_of(
        st.just("none"),
        st.tuples(st.just("leaves"), st.integers(0, 30)),
        st.tuples(st.just("joins"), st.integers(0, len(PREFIXES) - 1)),
        st.tuples(st.just("moves on"), st.integers(0, 400)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(first=st.lists(st.integers(0, len(PREFIXES) - 1), min_size=1, max_size=20), history=changes)
def test_any_history_gives_the_plans_of_a_fresh_start(first, history):
    chains, own = {}, {}

    def join(kind):
        request = len(chains)
        chains[request] = (*PREFIXES[kind], Link(100 + request, 1000, SlotPiece(None, 9)))
        own[request] = (PREFIXES[kind][-1].end_tokens if PREFIXES[kind] else 0) + 1 + 37 * request % 90
        return request

    running = [join(kind) for kind in first]
    kept = _Rank(chains.__getitem__)
    for change in history:
        kind, amount = change if change != "none" else ("none", 0)
        if kind == "leaves" and len(running) > 1:
            running = [*running[: amount % len(running)], *running[amount % len(running) + 1 :]]
        elif kind == "joins":
            running = [*running, join(amount)]
        own = {request: length + 1 + (amount if kind == "moves on" else 0) for request, length in own.items()}
        lengths = [own[request] for request in running]
        assert words(kept.plan(running, lengths)) == words(_Rank(chains.__getitem__).plan(running, lengths))


def test_a_prefix_plan_lasts_while_only_suffixes_grow():
    chains = {row: (*PREFIXES[row % 2], Link(100 + row, 1000, SlotPiece(None, 9))) for row in range(24)}
    rank, lengths = _Rank(chains.__getitem__), [800] * 24
    first = rank.plan(list(chains), lengths)
    later = rank.plan(list(chains), [length + 1 for length in lengths])
    assert later.prefix is first.prefix
    assert later.suffix.packed_tokens == first.suffix.packed_tokens + 24
    fewer = rank.plan(list(chains)[1:], [length + 2 for length in lengths[1:]])
    assert fewer.prefix is not first.prefix


def test_the_share_of_the_device_lasts_until_suffixes_have_grown_by_a_fifth():
    host = host_planner(Overlap(bytes_per_us=1e3))
    groups = (PrefixGroup(tuple(range(8)), 700, (Segment(5000, 700),)),)
    choice = Choice(Path.DENSE, (Path.DENSE,), ("asked",), "asked")
    plans = [
        host.plan(DecodeStep(np.full(8, 700 + own), *HEADS, groups), choice, 8).prefix for own in range(1000, 2600, 100)
    ]
    kept = sum(a is b for a, b in itertools.pairwise(plans))
    assert kept >= len(plans) // 2


def test_a_row_that_is_shorter_than_its_prefix_is_refused_in_any_step():
    host, groups = host_planner(), (PrefixGroup((0, 1), 700, (Segment(5000, 700),)),)
    choice = Choice(Path.DENSE, (Path.DENSE,), ("asked",), "asked")
    host.plan(DecodeStep(np.array([800, 900]), *HEADS, groups), choice, 2)
    with pytest.raises(LayoutError, match="row 1 is 1 tokens shorter than its prefix"):
        host.plan(DecodeStep(np.array([800, 699]), *HEADS, groups), choice, 2)
