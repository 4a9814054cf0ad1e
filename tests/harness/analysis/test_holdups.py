"""A wait that everybody shares is named; a slow start, one slow request and chunks that are seldom are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from harness.builders import block, held_up, late, request, serving_record
from prefixbench.analysis import frame
from prefixbench.analysis.holdups import HELD_UP, hold_up
from prefixbench.record import Block, RequestSample


def steady(change: Callable[[RequestSample], RequestSample] = lambda sample: sample, per_chunk: int = 8) -> Block:
    samples: Sequence[RequestSample] = [request(1.0 + 0.002 * i, 0.01, 200, per_chunk=per_chunk) for i in range(16)]
    return block([change(sample) for sample in samples])


def test_decoding_without_a_pause_is_not_held_up() -> None:
    assert hold_up(steady()) is None


@pytest.mark.parametrize(("by_s", "is_named"), [(0.1, False), (0.5, True)])
def test_a_wait_of_everybody_is_named_with_its_length(by_s: float, is_named: bool) -> None:
    found = hold_up(steady(lambda sample: late(sample, 2.0, by_s)))
    assert (found is not None) == is_named
    if found:
        assert found.startswith(f"{HELD_UP}: no request got a token for 0.5")
        assert found.endswith("s, 0.08 s is usual")


def test_chunks_that_are_seldom_are_usual() -> None:
    assert hold_up(steady(per_chunk=60)) is None
    assert hold_up(steady(lambda sample: late(sample, 2.0, 0.5), per_chunk=60)) is not None


def test_one_request_that_waits_holds_nobody_up() -> None:
    waits = late(request(1.0, 0.01, 200, per_chunk=8), 2.0, 0.5)
    assert hold_up(block([*steady().requests, waits])) is None


def test_before_all_have_started_and_after_one_has_ended_nothing_is_judged() -> None:
    starts_late, ends_early = request(3.0, 0.01, 200, per_chunk=8), request(1.0, 0.01, 20, per_chunk=8)
    assert hold_up(block([request(1.0, 0.01, 2), *[starts_late] * 3])) is None
    assert hold_up(block([ends_early, late(request(1.0, 0.01, 200, per_chunk=8), 1.5, 0.5)])) is None
    assert hold_up(block([])) is None
    assert hold_up(block([request(1.0, 0.01, 1)])) is None


def test_a_block_that_was_held_up_says_so_and_still_counts() -> None:
    record = serving_record("cascade", output_tokens=200)
    held = held_up(record, 2.0, 0.6)
    rows = frame.blocks([held])
    (flags,) = rows["flags"]
    assert any(flag.startswith(HELD_UP) for flag in flags)
    assert not rows["excluded"].any()
    assert not any(flag.startswith(HELD_UP) for flag in frame.blocks([record])["flags"].iloc[0])
