"""Amdahl's law, its inverse, and the contradictions it exposes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders import serving_record
from prefixbench.analysis import amdahl, frame
from prefixbench.analysis.stats import Interval


def exact(value: float) -> Interval:
    return Interval(value, None, None, 1, None, "given")


def point(stock_attention: float, cascade_attention: float, cascade_step: float) -> frame.Point:
    """Stock steps of 10 ms; attention seconds per step as given."""
    records = []
    for launch in range(3):
        for path, step, attention in (("stock", 0.010, stock_attention), ("cascade", cascade_step, cascade_attention)):
            wobble = 1 + 0.001 * launch
            timed = {"attention_s": 64 * attention * wobble, "decode_s": 64 * step * wobble}
            records.append(serving_record(path, launch, step * wobble, counter_changes=timed))
    return next(frame.points(frame.launches(frame.blocks(records))))


def test_the_law_and_the_explainers_figures() -> None:
    assert amdahl.speedup(0.6, 15.6) == pytest.approx(2.2807, abs=1e-4)
    assert amdahl.limit(0.6) == pytest.approx(2.5)
    assert amdahl.limit(1.0) == math.inf
    assert amdahl.required_share(2943 / 1360) == pytest.approx(0.538, abs=5e-4)


@given(st.floats(0.01, 0.99), st.floats(1.01, 1000))
def test_required_share_inverts_the_law(share: float, kernel_speedup: float) -> None:
    gained = amdahl.speedup(share, kernel_speedup)
    assert amdahl.required_share(gained, kernel_speedup) == pytest.approx(share, rel=1e-6)


def test_a_share_that_cannot_explain_the_gain_is_flagged() -> None:
    text = amdahl.contradiction(exact(2.164), exact(0.40))
    assert text == "2.16x needs a share of at least 53.8%, the profile shows 40.0%"
    assert amdahl.contradiction(exact(2.164), exact(0.55)) is None


def test_prediction_meets_measurement() -> None:
    """6 of 10 ms are attention, sped up 12x: 4.5 ms steps, 2.22x."""
    result = amdahl.check(point(0.006, 0.0005, 0.0045), "cascade")
    assert isinstance(result, amdahl.AmdahlCheck)
    assert result.basis == "attention"
    assert result.share.estimate == pytest.approx(0.6)
    assert result.kernel_speedup.estimate == pytest.approx(12)
    assert result.predicted.estimate == pytest.approx(10 / 4.5)
    assert result.measured.estimate == pytest.approx(10 / 4.5)
    assert result.contradiction is None


def test_prediction_and_measurement_apart_is_flagged() -> None:
    result = amdahl.check(point(0.006, 0.0005, 0.0080), "cascade")
    assert isinstance(result, amdahl.AmdahlCheck)
    assert "predicted 2.22x, measured 1.25x" in (result.contradiction or "")


def test_without_timers_it_says_how_to_get_them() -> None:
    records = [serving_record("stock", plugin=True), serving_record("cascade")]
    (found,) = frame.points(frame.launches(frame.blocks(records)))
    assert "engine.timers=true" in str(amdahl.check(found, "cascade"))
    assert "full was not measured" in str(amdahl.check(found, "full"))
