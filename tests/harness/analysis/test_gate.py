"""Outcomes of the gate on records: pass, fail, undecided, not comparable, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.builders import H200, kernel_record, serving_record
from prefixbench.analysis.gate.family import Rule
from prefixbench.analysis.gate.judge import GateConfig, evaluate
from prefixbench.record import Failure, Record, Telemetry, TelemetrySample

CONFIG = GateConfig()


def side(
    name: str, factor: float = 1.0, *, cv: float = 0.005, n: int = 5, seed: int = 0, **changes: object
) -> list[Record]:
    """`n` launches of one case, step time 10 ms x factor."""
    rng = np.random.default_rng([seed, sum(map(ord, name))])
    return [
        serving_record(
            "cascade",
            launch,
            float(0.01 * factor * np.exp(rng.normal(0, cv))),
            launch_id=f"{name}-{launch}",
            started_at=f"2030-01-01T00:{2 * launch + (name != 'base'):02d}:00+00:00",
            **changes,  # type: ignore[arg-type]
        )
        for launch in range(n)
    ]


def with_environment(records: Sequence[Record], **changes: object) -> list[Record]:
    return [replace(r, environment=replace(r.environment, **changes)) for r in records]  # type: ignore[arg-type]


def test_unchanged_code_passes() -> None:
    result = evaluate(side("base"), side("new"), CONFIG)
    assert (result.outcome, result.exit_code, result.reasons) == ("pass", 0, ())
    primary = result.rows[0]
    assert primary.is_primary
    assert primary.metric == "decode_tok_s"
    assert primary.change == pytest.approx(0, abs=0.01)


def test_a_slowed_decode_fails_in_every_metric_that_it_touches() -> None:
    result = evaluate(side("base"), side("new", 1.10), CONFIG)
    assert (result.outcome, result.exit_code) == ("fail", 1)
    assert {r.metric for r in result.rows if r.status == "regressed"} >= {"decode_tok_s", "tpot_ms"}
    assert all(r.change is not None and r.change < 0 for r in result.rows if r.status == "regressed"), (
        "negative is worse"
    )
    assert "is worse: -9" in result.reasons[0]


def test_a_change_below_the_magnitude_is_not_red_however_certain() -> None:
    assert evaluate(side("base", cv=1e-5), side("new", 1.005, cv=1e-5), CONFIG).outcome == "pass"


def test_noise_that_hides_the_margin_is_undecided_and_says_how_many_launches() -> None:
    result = evaluate(side("base", cv=0.08), side("new", cv=0.08, seed=3), CONFIG)
    assert (result.outcome, result.exit_code) == ("undecided", 2)
    assert "more launches of each would decide" in result.reasons[0]
    assert result.rows[0].more_launches


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_launches_are_undecided_never_a_pass(n: int) -> None:
    result = evaluate(side("base", n=n), side("new", n=n), CONFIG)
    assert result.outcome == "undecided"
    assert "3 of each are needed" in result.reasons[0]
    assert result.rows[0].low is None


def test_improvement_asks_for_a_new_baseline() -> None:
    result = evaluate(side("base"), side("new", 0.85), CONFIG)
    assert result.outcome == "pass"
    assert any("record a new baseline" in note for note in result.notes)


def test_ten_small_regressions_do_not_slip_past_the_anchor() -> None:
    config = replace(CONFIG, rule=Rule(min_magnitude=0.02))
    steps = [side(f"v{i}", 1.01**i, cv=0.002) for i in range(11)]
    against_previous = [evaluate(steps[i], steps[i + 1], config).outcome for i in range(10)]
    assert against_previous == ["pass"] * 10
    anchored = evaluate(steps[9], steps[10], config, anchor=steps[0])
    assert anchored.outcome == "fail"
    assert "against the anchor" in anchored.reasons[0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gpus": (replace(H200.gpus[0], name="NVIDIA H100"),)}, "GPU: NVIDIA H200 in the baseline, NVIDIA H100"),
        ({"gpus": (replace(H200.gpus[0], driver="600.1"),)}, "GPU driver: 580.1 in the baseline, 600.1"),
        ({"packages": {**H200.packages, "torch": "2.12.0"}}, "package torch: 2.11.0 in the baseline, 2.12.0"),
        ({"cuda": "12.9"}, "CUDA: 13.0 in the baseline, 12.9"),
    ],
)
def test_other_environments_are_refused_by_name(changes: dict[str, object], key: str) -> None:
    result = evaluate(side("base"), with_environment(side("new", 2.0), **changes), CONFIG)
    assert (result.outcome, result.exit_code) == ("not comparable", 3)
    assert key in result.reasons[0]


def test_what_is_under_test_may_differ() -> None:
    packages = {**H200.packages, "prefixonce": "0.2.0"}
    assert evaluate(side("base"), with_environment(side("new"), packages=packages), CONFIG).outcome == "pass"
    newer = with_environment(side("new"), packages={**H200.packages, "sglang": "0.5.17"})
    assert evaluate(side("base"), newer, CONFIG).outcome == "not comparable"
    assert evaluate(side("base"), newer, replace(CONFIG, under_test=("prefixonce", "sglang"))).outcome == "pass"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cache_state": "cold"}, "cache state: primed: 1 prefix in the baseline, cold"),
        ({"ran": {"stock": 64}}, "share of steps by stock: 0 in the baseline, 1"),
        ({"counter_changes": {"batch_histogram": {4: 128}}}, "realized batch: 8 in the baseline, 4"),
        ({"concurrency": 16}, "concurrency: 8 in the baseline, 16"),
        ({"engine_settings": {"page_size": 16}}, "engine_settings.page_size: 1 in the baseline, 16"),
    ],
)
def test_other_conditions_are_refused_by_name(changes: dict[str, object], key: str) -> None:
    result = evaluate(side("base"), side("new", **changes), CONFIG)
    assert result.outcome == "not comparable"
    assert any(key in reason for reason in result.reasons), result.reasons


def test_a_key_can_be_allowed_to_differ_and_is_named() -> None:
    config = replace(CONFIG, allow=("cache state",))
    result = evaluate(side("base"), side("new", cache_state="cold"), config)
    assert result.outcome == "pass"
    assert any("allowed to differ: cache state" in note for note in result.notes)


def test_lower_clock_is_not_a_regression() -> None:
    result = evaluate(side("base", sm_clock_mhz=1980), side("new", 1.25, sm_clock_mhz=1580), CONFIG)
    assert result.outcome == "not comparable"
    assert "SM clock (MHz): 1980 in the baseline, 1580" in result.reasons[0]


def capped(clock_mhz: int, power_w: float | None, bits: int = 0x4) -> tuple[Telemetry, ...]:
    samples = (TelemetrySample(i / 10, clock_mhz, power_w=power_w, throttle_reasons=bits) for i in range(3))
    return (Telemetry("nvml", 0.1, 0, tuple(samples)),)


@pytest.mark.parametrize(
    ("candidate", "outcome"),
    [
        (capped(1780, 690.0), "pass"),  # faster work that draws more: its clock is a part of its speed
        (capped(1780, 500.0), "not comparable"),  # the cap was lowered: drawing less, slower all the same
        (capped(1780, None), "not comparable"),
        (capped(1780, 690.0, bits=0), "not comparable"),
        (capped(1780, 690.0, bits=0x44), "not comparable"),
    ],
    ids=["own doing", "lowered cap", "power unknown", "no cap", "thermal"],
)
def test_a_clock_may_differ_only_where_the_work_itself_hit_the_cap(
    candidate: tuple[Telemetry, ...], outcome: str
) -> None:
    before = side("base", telemetry=capped(1980, 600.0, bits=0))
    result = evaluate(before, side("new", 0.9, telemetry=candidate), CONFIG)
    assert result.outcome == outcome
    said = [note for note in result.notes if "the power cap held the slower one" in note]
    assert len(said) == (outcome == "pass")


def test_another_machine_does_not_vouch_for_a_capped_clock() -> None:
    before = side("base", telemetry=capped(1980, 600.0, bits=0))
    after = with_environment(side("new", 0.9, telemetry=capped(1780, 690.0)), hostname="host-b")
    result = evaluate(before, after, CONFIG)
    assert "SM clock (MHz): 1980 in the baseline, 1780" in result.reasons[0]


def test_an_arm_without_valid_blocks_is_not_compared() -> None:
    result = evaluate(side("base"), side("new", 1.25, flags=("throttled: GPU 0, hot",)), CONFIG)
    assert result.outcome == "not comparable"
    assert "valid blocks: 5 used, 0 left out in the baseline, 0 used, 5 left out (throttled" in result.reasons[0]


def test_left_out_blocks_are_counted() -> None:
    spoilt = side("new", n=6)
    spoilt[0] = side("new", 2.0, n=6, flags=("clock fell: GPU 0",))[0]
    result = evaluate(side("base"), spoilt, CONFIG)
    assert any("candidate: 1 blocks left out (clock fell" in note for note in result.notes)
    assert result.rows[0].launches == (5, 5)


def test_flags_that_exclude_nothing_are_said() -> None:
    flags = ("other-load: 1.2 CPUs were busy", "other-load: 0.9 CPUs were busy")
    result = evaluate(side("base"), side("new", flags=flags), CONFIG)
    assert result.outcome == "pass"
    assert any("candidate: 5 of 5 launches are flagged other-load" in note for note in result.notes)


def test_a_failed_point_is_red() -> None:
    broken = side("new")
    broken[2] = replace(broken[2], status="oom", measurement=None, failure=Failure("oom", "out of memory"))
    result = evaluate(side("base"), broken, CONFIG)
    assert result.outcome == "fail"
    assert "oom in launch new-2: out of memory" in result.reasons[0]


def test_a_missing_case_is_named() -> None:
    both = side("base") + side("base", prefix_tokens=512)
    result = evaluate(both, side("new"), CONFIG)
    assert result.outcome == "not comparable"
    assert "512x8" in result.reasons[0]


def test_the_primary_spans_all_cases() -> None:
    baseline = side("base") + side("base", prefix_tokens=512)
    result = evaluate(baseline, side("new") + side("new", prefix_tokens=512), CONFIG)
    assert (result.rows[0].case, result.rows[0].is_primary) == ("all cases", True)
    assert result.outcome == "pass"


def test_kernel_records_are_gated_too() -> None:
    rng = np.random.default_rng(0)
    before = [kernel_record(launch=i, samples_us=[100 * float(np.exp(rng.normal(0, 0.01)))]) for i in range(5)]
    after = [kernel_record(launch=i + 5, samples_us=[110 * float(np.exp(rng.normal(0, 0.01)))]) for i in range(5)]
    config = replace(CONFIG, primary=None)
    assert evaluate(before, after, config).outcome == "fail"
    assert (
        evaluate(
            before, [replace(r, launch=replace(r.launch, launch_id=f"x{i}")) for i, r in enumerate(before)], config
        ).outcome
        == "pass"
    )


def test_a_kernel_timed_on_a_hot_chip_is_not_compared() -> None:
    before = [kernel_record(launch=i) for i in range(5)]
    hot = capped(1980, 600.0, bits=0x40)
    after = [
        replace(r, measurement=replace(r.measurement, telemetry=hot))
        for r in (kernel_record(launch=i + 5) for i in range(5))
    ]
    result = evaluate(before, after, CONFIG)
    assert result.outcome == "not comparable"
    assert "0 used, 5 left out (throttled: GPU 0, hardware thermal limit" in result.reasons[0]


def test_nothing_measured_is_undecided() -> None:
    empty = [replace(r, measurement=None) for r in side("base")]
    assert evaluate(empty, empty, CONFIG).outcome == "undecided"
