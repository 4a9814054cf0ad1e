"""Planning a step apart from running it: reuse, validity, counters, the pool's picture."""

import numpy as np
import pytest
import torch

from prefixonce.layout import Run
from prefixonce.plugin.grouping import Link, RunningRows
from prefixonce.plugin.picture import PoolRun, PrefixRun, draw
from prefixonce.plugin.runtime import ModelShape, Runtime
from prefixonce.plugin.settings import PluginSettings
from prefixonce.step import Mode, Path, Segment


@pytest.fixture
def runtime():
    made = Runtime(PluginSettings(mode=Mode.CASCADE))
    made.shape = ModelShape(num_q_heads=8, num_kv_heads=2, head_dim=32, kv_token_bytes=1024)
    made.rows = RunningRows(lambda request: PREFIX if request.startswith("shares") else ())
    return made


def fits(_step, _sharing):
    return True


def lens(*seq_lens):
    return np.array(seq_lens)


PREFIX = (Link(1, 100, Segment(50, 100)),)
PAIR = ["shares 0", "shares 1"]


def test_a_planned_step_is_counted_when_it_runs(runtime):
    runtime.plan(["shares 0", "shares 1", "alone", "shares 2"], lens(110, 111, 7, 112))
    planned = runtime.take(lens(110, 111, 7, 112), fits)
    assert planned.choice.path is Path.CASCADE
    assert planned.step.groups[0].rows == (0, 1, 3)
    counters = runtime.counters.to_json()
    assert counters["steps"] == {"stock": 0, "paged": 0, "cascade": 1, "dense": 0}
    assert counters["decode_tokens"] == 4
    assert counters["group_steps"] == 1
    assert counters["prefix_tokens_read_once"] == 100
    assert counters["prefix_tokens_read_by_stock"] == 300
    assert counters["bytes_saved"] == 2 * 100 * 1024
    assert counters["batch_histogram"] == {"4": 1}
    assert counters["reasons"] == {"cascade was asked for": 1}


def test_a_stock_step_claims_no_savings(runtime):
    runtime.mode = Mode.STOCK
    runtime.plan(PAIR, lens(110, 111))
    assert runtime.take(lens(110, 111), fits).choice.path is Path.STOCK
    assert runtime.counters.bytes_saved == runtime.counters.group_steps == 0


def test_a_plan_is_handed_out_once(runtime):
    runtime.plan(PAIR, lens(110, 111))
    assert runtime.take(lens(110, 111), fits) is not None
    assert runtime.take(lens(110, 111), fits) is None


def test_a_plan_for_other_rows_is_never_used(runtime):
    runtime.plan(PAIR, lens(110, 111))
    planned = runtime.take(lens(110, 112), fits)
    assert planned.choice.path is Path.STOCK
    assert planned.step.seq_lens.tolist() == [110, 112]
    assert planned.step.groups == ()
    assert runtime.counters.to_json()["reasons"] == {"not the step that was planned": 1}


def test_a_step_that_the_kernels_cannot_hold_is_left_to_stock(runtime):
    runtime.plan(PAIR, lens(110, 111))
    assert runtime.take(lens(110, 111), lambda _step, _sharing: False).choice.path is Path.STOCK
    assert list(runtime.counters.reasons) == ["the slot lists outgrow the static buffers"]


def test_a_batch_that_is_no_decode_voids_the_plan(runtime):
    runtime.plan(PAIR, lens(110, 111))
    runtime.drop_plan()
    assert runtime.take(lens(110, 111), fits) is None


def test_what_did_not_change_is_not_decided_again(runtime):
    runtime.plan(PAIR, lens(110, 111))
    first = runtime.take(lens(110, 111), fits)
    runtime.plan(list(PAIR), lens(111, 112))
    second = runtime.take(lens(111, 112), fits)
    assert second.step.groups is first.step.groups
    assert second.choice is first.choice
    assert second.sharing is first.sharing
    assert second.step.rows_id is first.step.rows_id is not None
    runtime.plan([PAIR[0], "alone"], lens(115, 116))
    third = runtime.take(lens(115, 116), fits).step
    assert third.groups == ()
    assert third.rows_id is not first.step.rows_id


@pytest.mark.parametrize("mode", [Mode.STOCK, Mode.PAGED])
def test_without_sharing_nobody_reads_the_tree(runtime, mode):
    runtime.mode, runtime.rows = mode, RunningRows(lambda _request: pytest.fail("a chain was read"))
    runtime.plan(PAIR, lens(110, 111))
    assert runtime.take(lens(110, 111), fits).choice.path.name == mode.name
    assert runtime.counters.decode_tokens == 2
    assert runtime.counters.group_steps == 0


def test_the_picture_covers_the_pool_without_gaps():
    picture = draw(Run(1, 100), [Run(11, 10), Run(90, 11)], [PrefixRun(Run(40, 20), 7, 3)])
    assert picture == [
        PoolRun(1, 10, "pages"),
        PoolRun(11, 10, "free"),
        PoolRun(21, 19, "pages"),
        PoolRun(40, 20, "prefix-run", 7, 3),
        PoolRun(60, 30, "pages"),
        PoolRun(90, 11, "free"),
    ]


def test_a_fragmented_pool_is_drawn_coarser_but_keeps_every_prefix():
    free = [Run(1 + 4 * i, 1 + (i % 97 == 0)) for i in range(20000)]
    prefixes = [PrefixRun(Run(90000 + 100 * i, 64), i, 1) for i in range(20)]
    picture = draw(Run(1, 100000), free, prefixes)
    assert len(picture) <= 4096
    assert sum(run.length for run in picture) == 100000
    assert sum(run.kind == "prefix-run" for run in picture) == 20
    assert any(run.kind == "free" for run in picture)


def test_slots_of_prefixes_and_planted_faults():
    from prefixonce.plugin.faults import Fault, FaultKind
    from prefixonce.step import PrefixGroup, SlotPiece

    k, v = torch.randn(20, 2, 4), torch.randn(20, 2, 4)
    group = PrefixGroup((0, 1), 5, (Segment(2, 3), SlotPiece(torch.tensor([9, 15]), 2)), 1)
    zeroed, _ = Fault(FaultKind.ZERO_PREFIX).corrupt([group], k, v)
    assert not zeroed[[2, 3, 4, 9, 15]].any()
    assert torch.equal(zeroed[[0, 1, 5, 10]], k[[0, 1, 5, 10]])
    same_k, moved = Fault(FaultKind.PERMUTE_PREFIX).corrupt([group], k, v)
    assert torch.equal(same_k, k)
    assert not torch.equal(moved[2:5], v[2:5])
    assert torch.equal(moved[2:5].sort(dim=0).values, v[2:5].sort(dim=0).values)
    untouched, _ = Fault().corrupt([group], k, v)
    assert untouched is k
