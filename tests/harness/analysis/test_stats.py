"""Closed-form intervals, pairing, Fieller against the bootstrap, and coverage that can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbench.analysis import stats
from prefixbench.analysis.quantity import percentile


def by_launch(values: list[float], prefix: str = "launch") -> dict[str, float]:
    return {f"{prefix}-{i}": v for i, v in enumerate(values)}


def test_one_launch_has_no_interval() -> None:
    interval = stats.mean_interval([100.0])
    assert (interval.estimate, interval.low, interval.high, interval.sd) == (100.0, None, None, None)
    assert stats.mean_interval([]).estimate is None


@pytest.mark.parametrize(
    ("values", "factor"),
    [([100.0, 102.0], 8.985), ([100.0, 102.0, 101.0], 2.484), ([100.0, 101.0, 99.0, 100.0, 100.0], 1.242)],
)
def test_student_half_width(values: list[float], factor: float) -> None:
    interval = stats.mean_interval(values)
    assert interval.sd is not None
    assert interval.half_width == pytest.approx(factor * interval.sd, rel=1e-3)


def test_sample_standard_deviation() -> None:
    assert stats.mean_interval([100.0, 101.0, 99.0, 100.0, 100.0]).sd == pytest.approx(0.707107, abs=1e-6)


def test_shared_launches_are_paired() -> None:
    """A drift common to both arms cancels; with other launch ids it does not."""
    drift = [0.0, 50.0, 100.0]
    slow, fast = [1000 + d for d in drift], [1010 + d + e for d, e in zip(drift, [0, 1, -1], strict=True)]
    paired = stats.difference(by_launch(fast), by_launch(slow))
    unpaired = stats.difference(by_launch(fast), by_launch(slow, "other"))
    assert paired.half_width == pytest.approx(2.484, rel=1e-3), "sd of the differences is 1"
    assert unpaired.half_width is not None
    assert unpaired.half_width > 50
    assert "paired" in paired.method
    assert "unpaired" in unpaired.method


def test_welch_matches_scipy() -> None:
    from scipy.stats import ttest_ind

    a, b = [10.0, 12.0, 11.0, 15.0], [8.0, 8.5, 9.0]
    interval = stats.difference(by_launch(a), by_launch(b, "b"))
    expected = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_ratio_of_exact_multiples_has_no_width() -> None:
    base = [900.0, 1000.0, 1100.0]
    ratio = stats.ratio(by_launch([2 * x for x in base]), by_launch(base))
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


@given(st.lists(st.floats(50, 150), min_size=3, max_size=8), st.floats(0.5, 3.0))
def test_a_ratio_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    other = [v * 1.5 + 0.1 * i for i, v in enumerate(values)]
    plain = stats.ratio(by_launch(other, "x"), by_launch(values))
    scaled = stats.ratio(by_launch([v * unit for v in other], "x"), by_launch([v * unit for v in values]))
    if plain.low is None:
        assert scaled.low is None
    else:
        assert (scaled.low, scaled.estimate, scaled.high) == pytest.approx((plain.low, plain.estimate, plain.high))


SHARE = ([-1, 1, 0], [-1, 0, 1])  # of the second in what the third gained over the first


def bootstrap(
    samples: list[dict[str, float]], *, are_paired: bool, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95% percentile interval of the share, whole launches resampled; knows nothing of the code under test."""
    rng = np.random.default_rng(seed)
    values = np.array([list(sample.values()) for sample in samples])
    count = values.shape[1]
    picked = rng.integers(0, count, (1 if are_paired else len(samples), draws, count))
    means = np.take_along_axis(values[:, None, :], np.broadcast_to(picked, (len(samples), draws, count)), 2).mean(2)
    top, bottom = (np.array(weights) @ means for weights in SHARE)
    low, high = np.quantile(top / bottom, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("are_paired", [False, True])
def test_fieller_and_bootstrap_agree(are_paired: bool) -> None:
    """Twenty launches at 1%, or at 3% most of which all paths of a launch share: ends within a tenth of the width."""
    rng = np.random.default_rng(7)
    drift = 1 + (0.03 * rng.normal(size=20) if are_paired else 0)
    samples = [
        by_launch(list(mean * drift * rng.normal(1, 0.01, 20)), "launch" if are_paired else str(mean))
        for mean in (1360, 2800, 2943)
    ]
    fieller = stats.contrast_ratio(samples, *SHARE)
    assert fieller.method == ("Fieller, paired by launch" if are_paired else "Fieller, unpaired")
    assert fieller.half_width is not None
    assert bootstrap(samples, are_paired=are_paired) == pytest.approx(
        (fieller.low, fieller.high), abs=0.2 * fieller.half_width
    )


def test_fieller_covers_as_often_as_it_says_and_the_bootstrap_does_not() -> None:
    rng = np.random.default_rng(3)
    truth, hits, bootstrap_hits, trials = 1440 / 1583, 0, 0, 400
    for _ in range(trials):
        samples = [by_launch(list(rng.normal(m, 0.02 * m, 4)), str(m)) for m in (1360, 2800, 2943)]
        hits += stats.contrast_ratio(samples, *SHARE).contains(truth)
        low, high = bootstrap(samples, are_paired=False, draws=400)
        bootstrap_hits += low <= truth <= high
    assert 0.92 <= hits / trials <= 0.985
    assert bootstrap_hits < hits, "four launches are too few for the percentile bootstrap"


def test_gain_of_zero_has_no_ratio() -> None:
    flat = [by_launch([99.0, 100.0, 101.0], name) for name in "abc"]
    interval = stats.contrast_ratio(flat, [-1, 1, 0], [-1, 0, 1])
    assert interval.estimate is None
    assert interval.note == stats.NO_DENOMINATOR


def test_missing_sample_is_missing() -> None:
    assert stats.ratio({}, by_launch([1.0, 2.0])).note == "no launch"
    assert stats.ratio({"a": 2.0}, {"a": 1.0}).estimate == 2
    assert stats.ratio({"a": 2.0}, {"a": 1.0}).low is None


@pytest.mark.parametrize("half_width", [0.2, 0.5, 1.0, 3.0])
def test_launches_needed_is_the_smallest(half_width: float) -> None:
    needed = stats.launches_needed(1.0, half_width)
    assert needed is not None

    def width(n: int) -> float:
        from scipy.stats import t

        return float(t.isf(0.025, n - 1)) / math.sqrt(n)

    assert width(needed) <= half_width
    assert needed == 2 or width(needed - 1) > half_width


def test_instability_says_what_to_do() -> None:
    assert stats.instability([100.0, 100.1, 99.9]) is None
    shaky = [100.0, 103.0, 97.0]
    needed = stats.launches_needed(3.0, 2.0)
    assert needed == 12
    assert stats.instability(shaky) == f"±7.5% after 3 launches; ±2% needs about {needed - 3} more launches"
    assert "a quieter machine" in (stats.instability([100.0, 300.0, 1.0], target=1e-4) or "")
    assert "no error bar" in (stats.instability([100.0]) or "")


def test_spread_has_a_chi_square_interval() -> None:
    spread = stats.spread_interval([94.0, 100.0, 106.0])
    assert spread.estimate == pytest.approx(0.06)
    assert spread.low == pytest.approx(0.06 * math.sqrt(2 / 7.37776), rel=1e-4)
    assert stats.spread_interval([100.0]).estimate is None
    pooled = stats.spread_interval([94.0, 100.0, 106.0], [940.0, 1000.0, 1060.0], [5.0])
    assert pooled.estimate == pytest.approx(0.06)
    assert pooled.high is not None
    assert spread.high is not None
    assert pooled.high < spread.high


def test_percentiles_need_samples_beyond_them() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.95).value == pytest.approx(95.05)
    assert percentile(values, 0.99).reason == "p99 needs 500 samples, there are 100"
    assert percentile(values[:10], 0.5).value == pytest.approx(5.5)
    assert percentile(values[:9], 0.5).value is None
