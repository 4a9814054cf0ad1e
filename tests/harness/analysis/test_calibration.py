"""Calibration: the fit finds the profile that made the times, thresholds find the crossing, regret adds up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders import CPU, kernel_record
from prefixbench.analysis.dispatcher import thresholds
from prefixbench.analysis.dispatcher.calibration import calibrate
from prefixbench.analysis.dispatcher.cost_fit import PATHS, fit
from prefixbench.analysis.dispatcher.regret import regret, rules
from prefixbench.analysis.dispatcher.thresholds import best_threshold, dense_threshold, sharing_thresholds
from prefixbench.analysis.dispatcher.timed_cells import TimedCell, timed_grid
from prefixbench.errors import UsageError
from prefixbench.record import Record
from prefixonce.cost import CONSERVATIVE, Layer, Profile, SharedCost, StockCost
from prefixonce.step import Path

TRUE = Profile(
    device="NVIDIA H200",
    source="a test",
    processors=132,
    tile_rows=128,
    memory_bytes_per_us=4.2e6,
    stock=StockCost(launch_us=9.0, row_us=0.018, reread_bytes_per_us=10e6),
    shared=SharedCost(
        launch_us=9.4,
        row_us=0.012,
        split_us=0.11,
        partial_bytes_per_us=6e6,
        cascade_flops_per_us=700e6,
        dense_flops_per_us=800e6,
    ),
)
KNOWN = replace(CONSERVATIVE, device=TRUE.device, source=TRUE.source, processors=132, tile_rows=128)
DESIGN = [
    *(
        Layer(rows, tokens, tokens, 32, 8, 128)
        for tokens, rows in product((128, 512, 2048, 8192), (2, 8, 32, 128, 512))
    ),
    *(Layer(rows, tokens, tokens, 4, 1, 128) for tokens, rows in product((512, 8192), (8, 128))),
    *(Layer(rows, 512, 512, 32, 8, 128, own) for rows, own in product((8, 64, 256), (32, 1024))),
]


def cells(profile: Profile, noise: float = 0.0) -> list[TimedCell]:
    generator = np.random.default_rng(3)
    factors = np.exp(noise * generator.standard_normal((len(DESIGN), len(PATHS))))
    return [
        TimedCell(layer, {p: profile.layer_us(layer, p) * f for p, f in zip(PATHS, row, strict=True)}, ())
        for layer, row in zip(DESIGN, factors, strict=True)
    ]


def off(found: Profile, true: Profile, layers: Iterable[Layer]) -> float:
    """Largest relative error of the times of layers that the fit has not seen."""
    return max(abs(found.layer_us(layer, p) / true.layer_us(layer, p) - 1) for layer, p in product(layers, PATHS))


UNSEEN = [Layer(rows, tokens, tokens, 16, 4, 128) for rows, tokens in product((4, 48, 300), (64, 1024, 16384))]


def test_the_fit_finds_the_profile_that_made_the_times() -> None:
    found = fit(cells(TRUE), KNOWN)
    assert off(found.profile, TRUE, UNSEEN) < 0.02
    assert found.profile.stock.reread_bytes_per_us == pytest.approx(10e6, rel=0.02)
    assert found.profile.shared.dense_flops_per_us == pytest.approx(800e6, rel=0.03)
    assert all(residuals.largest < 0.02 for residuals in found.residuals.values())
    assert (found.profile.device, found.profile.processors) == ("NVIDIA H200", 132)


def test_noise_and_one_spoilt_cell_do_not_lead_the_fit_astray() -> None:
    noisy = cells(TRUE, noise=0.03)
    noisy[7] = replace(noisy[7], us={path: 8 * us for path, us in noisy[7].us.items()})
    found = fit(noisy, KNOWN)
    assert off(found.profile, TRUE, UNSEEN) < 0.12
    assert found.residuals[Path.DENSE].median < 0.05
    assert found.residuals[Path.DENSE].largest > 0.8


def test_a_device_a_hundred_times_slower_is_fitted_as_well() -> None:
    slow = replace(
        TRUE,
        memory_bytes_per_us=4.2e4,
        stock=StockCost(900.0, 1.8, 10e4),
        shared=SharedCost(940.0, 1.2, 11.0, 6e4, 7e6, 8e6),
    )
    assert off(fit(cells(slow), KNOWN).profile, slow, UNSEEN) < 0.02


def test_few_cells_are_refused() -> None:
    with pytest.raises(UsageError, match="11 cells were timed with stock, cascade and dense; a fit needs at least 12"):
        fit([*cells(TRUE)[:11], replace(cells(TRUE)[12], us={Path.DENSE: 1.0})], KNOWN)


@given(
    st.lists(st.tuples(st.sampled_from([4, 16, 64, 256]), st.floats(-1, 1)), min_size=1, max_size=12),
)
def test_no_other_threshold_is_better(drawn: list[tuple[int, float]]) -> None:
    m_eff, gain = (np.array(column, float) for column in zip(*drawn, strict=True))

    def total(threshold: float) -> float:
        return float(gain[m_eff >= threshold].sum())

    best = best_threshold(m_eff, gain)
    assert total(best) <= min(total(t) for t in (0, 4, 16, 64, 256, math.inf)) + 1e-9


def timed(rows: int, tokens: int, **us: float) -> TimedCell:
    names = {"stock": Path.STOCK, "cascade": Path.CASCADE, "dense": Path.DENSE}
    return TimedCell(Layer(rows, tokens, tokens, 32, 8, 128), {names[name]: value for name, value in us.items()}, ())


def test_thresholds_and_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = [timed(2**i, 512, stock=10, cascade=9 if i > 3 else 12, dense=8 if i > 5 else 14) for i in range(1, 9)] * 4
    found = dense_threshold(clear)
    assert found is not None
    assert found.estimate == 4 * 2**6
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 256 <= found.high <= 512
    assert sharing_thresholds(clear)[512].estimate == 4 * 2**4
    unclear = dense_threshold([timed(2**i, 512, cascade=10, dense=10 + (-1) ** i) for i in range(1, 9)])
    assert unclear is not None
    assert (unclear.low or 0) < (unclear.high or 0)
    never = [timed(2**i, 512, cascade=9, dense=10) for i in range(1, 9)]
    assert (dense_threshold(never) or found).estimate == math.inf
    assert sharing_thresholds(never) == {}
    assert dense_threshold(never[:1]) is None
    monkeypatch.setattr(thresholds, "_SEED", 2)
    again = dense_threshold(clear)
    assert again is not None
    assert again.estimate == found.estimate


def test_regret_by_hand() -> None:
    grid = [timed(1, 512, stock=10, cascade=8, dense=9), timed(64, 512, stock=30, cascade=15, dense=20)]
    found = regret("always dense", lambda _: Path.DENSE, grid)
    assert found.extra == pytest.approx(29 / 23 - 1)
    assert found.worst == pytest.approx(1 / 3)
    assert found.mean == pytest.approx((1 / 8 + 1 / 3) / 2)
    assert found.worst_cell == "prefix 512 + 256, 64 requests, 32/8 heads"
    assert found.gain_share == pytest.approx((40 - 29) / (40 - 23))
    assert found.fastest == 0
    assert regret("always stock", lambda _: Path.STOCK, grid).gain_share == 0.0
    nothing = [timed(64, 512, stock=1, cascade=2, dense=3)]
    assert regret("x", lambda _: Path.STOCK, nothing).gain_share is None


def test_the_rules_are_the_dispatchers_own() -> None:
    by_name = {name.partition(":")[0]: rule for name, rule in rules(TRUE).items()}
    large, small, alone = timed(256, 16384), timed(8, 64), timed(1, 16384)
    assert [by_name["auto"](cell) for cell in (large, small, alone)] == [Path.DENSE, Path.STOCK, Path.STOCK]
    assert [by_name["full"](cell) for cell in (large, small, alone)] == [Path.DENSE, Path.CASCADE, Path.STOCK]
    assert by_name["always stock"](large) is Path.STOCK


def test_auto_with_the_true_profile_hardly_loses_and_a_wrong_one_does() -> None:
    grid = cells(TRUE)
    by_name = rules(TRUE)
    assert regret("auto", by_name["auto"], grid).extra < 0.005
    stingy = replace(TRUE, shared=replace(TRUE.shared, launch_us=1000.0))
    assert regret("auto", rules(stingy)["auto"], grid).extra > 0.2


def records(make: Callable[..., Record] = kernel_record, **changes: object) -> list[Record]:
    """The design as records, timed by TRUE; a layer's tokens are its case's."""
    names = {"flashinfer-decode": Path.STOCK, "cascade": Path.CASCADE, "dense": Path.DENSE}
    return [
        make(
            name,
            samples_us=[TRUE.layer_us(layer, path)],
            **{
                "l2": "cold",
                "layout": "shared-contiguous",
                "prefix_tokens": layer.prefix_tokens,
                "suffix_tokens": int(layer.own_tokens),
                "batch": layer.rows,
                "q_heads": layer.q_heads,
                "kv_heads": layer.kv_heads,
                **changes,
            },
        )
        for layer in DESIGN
        for name, path in names.items()
    ]


def test_calibrate_reads_records_and_says_where_the_fit_comes_from() -> None:
    found = calibrate(records())
    assert off(found.fitted.profile, TRUE, UNSEEN) < 0.02
    assert found.about["stock"] == "flashinfer-decode"
    assert found.about["l2"] == "cold"
    assert found.about["cells"] == len(DESIGN)
    assert "stock is flashinfer-decode" in found.fitted.profile.source
    assert found.dense is not None
    assert found.about["dense_over_cascade_from_m_eff"]
    assert set(found.sharing) == {128, 512, 2048, 8192}


def test_wrong_results_copies_and_warm_timings_take_no_part() -> None:
    good = records()
    wrong = replace(good[0], status="failed", record_id="wrong/launch")
    copies = kernel_record("dense", samples_us=[1.0], layout="unique", prefix_tokens=128, batch=2)
    warm = records(l2="warm")[0]
    grid = timed_grid([*good, wrong, copies, warm])
    assert grid.cells == timed_grid(good).cells


def test_paged_stands_for_stock_where_the_peer_is_missing() -> None:
    names = {"flashinfer-decode": "paged"}
    ours = records(lambda name, **changes: kernel_record(names.get(name, name), **changes))
    grid = timed_grid(ours)
    assert grid.stock == "paged"
    assert len(grid.complete) == len(DESIGN)


def test_records_of_two_devices_are_not_mixed() -> None:
    with pytest.raises(UsageError, match="exactly one device"):
        timed_grid([*records(), *records(environment=CPU)])
    with pytest.raises(UsageError, match="no kernel records"):
        timed_grid([])
