"""Shares name their yardstick, are never clipped, and go to nobody whose kernel did not run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbench.analysis.attribution import Rung, attribute, attribute_reported, shapley

SEED = {"stock": 1360.0, "cascade": 2800.0, "full": 2943.0}


def launches(mean: float, cv: float = 0.01, n: int = 5, seed: int = 0) -> dict[str, float]:
    rng = np.random.default_rng([seed, int(mean)])
    return {f"launch-{i}": float(v) for i, v in enumerate(rng.normal(mean, cv * mean, n))}


def ladder(ran: dict[str, dict[str, float]] | None = None, values: dict[str, float] = SEED) -> list[Rung]:
    return [Rung(path, launches(mean), (ran or {}).get(path)) for path, mean in values.items()]


@pytest.mark.parametrize(("yardstick", "share"), [("throughput", 0.9097), ("time per token", 0.9561), ("log", 0.9355)])
def test_the_reported_table(yardstick: str, share: float) -> None:
    result = attribute_reported(SEED, yardstick)  # type: ignore[arg-type]
    assert result.shares[0].share.estimate == pytest.approx(share, abs=5e-5)
    assert result.shares[0].share.low is None, "one figure has no error bar"


def test_the_interval_that_one_percent_spread_gives() -> None:
    share = attribute_reported(SEED, cv=0.01, n=5).shares[0].share
    assert (share.low, share.high) == pytest.approx((0.888, 0.931), abs=5e-4)


def test_a_share_above_one_is_not_clipped() -> None:
    cascade, full = attribute_reported({"stock": 1360, "cascade": 3000, "full": 2943}).shares
    assert cascade.share.estimate == pytest.approx(1.0360, abs=5e-5)
    assert full.share.estimate == pytest.approx(-0.0360, abs=5e-5)


def test_no_share_of_nothing() -> None:
    flat = attribute_reported({"stock": 1360, "cascade": 1362, "full": 1365}, cv=0.01, n=5)
    assert flat.refusal == "gain not distinguishable from 0, no share"
    for yardstick in ("throughput", "time per token", "log"):
        loss = attribute_reported({"stock": 1360, "cascade": 1300, "full": 1250}, yardstick, cv=0.01, n=5)  # type: ignore[arg-type]
        assert loss.refusal == "no gain to split"


def test_measured_launches_give_an_interval() -> None:
    result = attribute(ladder({"cascade": {"cascade": 1.0}, "full": {"dense": 0.9, "stock": 0.1}}))
    assert result.refusal is None
    share = result.shares[0].share
    assert share.contains(0.9097)
    assert sum(s.share.estimate or 0 for s in result.shares) == pytest.approx(1)
    assert result.shares[1].active_share == pytest.approx(0.9)


def test_no_credit_to_a_path_that_did_not_run() -> None:
    result = attribute(ladder({"cascade": {"stock": 1.0, "cascade": 0.0}, "full": {"dense": 1.0}}))
    assert all(share.share.estimate is None for share in result.shares)
    assert "cascade active on 0% of steps" in (result.refusal or "")


def test_full_that_only_ran_cascade_credits_dense_with_nothing() -> None:
    result = attribute(ladder({"cascade": {"cascade": 1.0}, "full": {"cascade": 1.0}}))
    cascade, full = result.shares
    assert cascade.share.estimate is not None
    assert full.share.estimate is None
    assert "dense active on 0% of steps" in (full.share.note or "")
    assert result.refusal is None


def test_shapley_without_every_order_says_so() -> None:
    split = shapley({path: {"a": value} for path, value in SEED.items()})
    assert split is not None
    assert split.shares["read once"] == pytest.approx(0.9097, abs=5e-5)
    assert (split.orders_used, split.orders_possible) == (1, 2)


def test_shapley_shares_what_either_ingredient_would_bring() -> None:
    measured = {"stock": {"a": 1000.0}, "cascade": {"a": 2000.0}, "dense": {"a": 2000.0}, "full": {"a": 2000.0}}
    split = shapley(measured)
    assert split is not None
    assert split.shares == pytest.approx({"read once": 0.5, "contiguous + dense": 0.5})
    assert split.orders_used == split.orders_possible == 2


def test_shapley_needs_a_baseline_and_a_gain() -> None:
    assert shapley({"cascade": {"a": 1.0}, "full": {"a": 2.0}}) is None
    assert shapley({"stock": {"a": 1.0}, "cascade": {"a": 1.0}}) is None


@given(st.lists(st.floats(100, 10_000), min_size=3, max_size=3, unique=True))
def test_shares_sum_to_one_or_are_refused(values: list[float]) -> None:
    for yardstick in ("throughput", "time per token", "log"):
        result = attribute_reported(dict(zip(SEED, values, strict=True)), yardstick)  # type: ignore[arg-type]
        if values[2] > values[0]:
            assert sum(s.share.estimate or 0 for s in result.shares) == pytest.approx(1, abs=1e-6)
        else:
            assert result.refusal == "no gain to split"
