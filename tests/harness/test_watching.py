"""What telemetry costs: blocks with it and blocks without, from the configuration to the verdict."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders import serving_record
from harness.test_config import load
from prefixbench import cli, store
from prefixbench.analysis import frame
from prefixbench.analysis.watching import WatchingCost, watching_costs
from prefixbench.case import case_hash
from prefixbench.config.cases import sweep_cases
from prefixbench.engines.fake import FakeServer
from prefixbench.errors import UsageError
from prefixbench.jobs.sweep import has_telemetry
from prefixbench.machine.clocks import NOT_WATCHED
from prefixbench.record import Block, Record, ServingMeasurement, Telemetry, TelemetrySample
from prefixbench.report.build import Selected, build
from prefixbench.report.view import Note, Table
from prefixbench.workloads import PromptSpec
from record_factory import flags_of

NO_REASON, THERMAL = 0x0, 0x40
FAKE = ("engine=fake", "path=full", "launches=1", "measure.watch=half")


def of_blocks(record: Record) -> tuple[Block, ...]:
    assert isinstance(record.measurement, ServingMeasurement)
    return record.measurement.blocks


def with_blocks(record: Record, blocks: Sequence[Block]) -> Record:
    assert isinstance(record.measurement, ServingMeasurement)
    return replace(record, measurement=replace(record.measurement, blocks=tuple(blocks)))


def half_watched(ratios: Sequence[float], reason: int = NO_REASON, samples: int = 10) -> Record:
    """A pair of blocks for every ratio of tokens per second, watched over not watched."""
    step_s, kinds = [], [has_telemetry(block, 0) for block in range(2 * len(ratios))]
    for block, watched in enumerate(kinds):
        step_s.append(0.01 / ratios[block // 2] if watched else 0.01)
    record = serving_record(path="full", step_s=step_s)
    seen = tuple(TelemetrySample(0.1 * i, sm_clock_mhz=1980, throttle_reasons=reason) for i in range(samples))
    telemetry = (Telemetry("nvml", 0.1, 0, seen),)
    return with_blocks(
        record,
        [
            replace(block, telemetry=telemetry) if watched else replace(block, flags=(NOT_WATCHED,))
            for block, watched in zip(of_blocks(record), kinds, strict=True)
        ],
    )


def cost_of(record: Record) -> WatchingCost:
    (found,) = watching_costs([record])
    return found


@pytest.mark.parametrize(
    ("middle", "verdict"), [(0.998, "under"), (1.001, "under"), (0.996, "undecided"), (0.99, "over")]
)
def test_the_interval_of_four_pairs_is_the_textbooks(middle: float, verdict: str) -> None:
    cost = cost_of(half_watched([middle - 0.001, middle + 0.001, middle + 0.001, middle - 0.001]))
    half = 3.182446 * math.sqrt(4 / 3) * 0.001 / math.sqrt(4)  # Student's t for 3 degrees of freedom
    assert cost.ratio.estimate == pytest.approx(middle, abs=1e-6)
    assert (cost.ratio.low, cost.ratio.high) == pytest.approx((middle - half, middle + half), abs=1e-6)
    assert (cost.ratio.n, cost.pairs_left_out, cost.verdict) == (4, 0, verdict)
    assert cost.unwatched_tok_s == pytest.approx(800)
    assert cost.watched_tok_s == pytest.approx(800 * middle)


def test_one_pair_gives_no_interval_and_decides_nothing() -> None:
    cost = cost_of(half_watched([0.5]))
    assert (cost.ratio.low, cost.ratio.high, cost.verdict) == (None, None, "undecided")
    assert cost.ratio.note == "an interval needs at least 2 pairs of blocks, 1 can be compared"


def test_a_steady_drift_makes_the_interval_wide_and_not_the_estimate_wrong() -> None:
    record = half_watched([1.0] * 4)
    slower = serving_record(path="full", step_s=[0.01 * 1.01**block for block in range(8)])
    drifting = [
        replace(block, requests=late.requests) for block, late in zip(of_blocks(record), of_blocks(slower), strict=True)
    ]
    cost = cost_of(with_blocks(record, drifting))
    assert cost.ratio.estimate == pytest.approx(1.0, abs=1e-4)
    assert cost.verdict == "undecided"


def test_pairs_that_say_nothing_about_sampling_are_left_out() -> None:
    blocks = list(of_blocks(half_watched([0.9, 1.0, 1.0, 1.0])))
    blocks[1] = replace(blocks[1], flags=(NOT_WATCHED, "cold-cache"))
    cost = cost_of(with_blocks(half_watched([1.0] * 4), blocks))
    assert (cost.ratio.n, cost.pairs_left_out, cost.ratio.estimate) == (3, 1, pytest.approx(1.0))
    lost = cost_of(with_blocks(half_watched([1.0] * 4), blocks[2:5]))
    assert (lost.ratio.n, lost.pairs_left_out) == (1, 0), "a last block alone is no pair"
    blind = cost_of(half_watched([0.9] * 4, samples=0))
    assert (blind.ratio.n, blind.ratio.estimate, blind.verdict) == (0, None, "undecided"), "nobody asked the device"
    assert watching_costs([serving_record(step_s=[0.01, 0.01])]) == []


def test_clocks_leave_no_block_out_here_and_none_without_telemetry_elsewhere() -> None:
    record = half_watched([0.9] * 4, reason=THERMAL)
    assert cost_of(record).verdict == "over", "only the watched blocks could be left out, which would hide the cost"
    rows = frame.blocks([record], exclude=frame.UNTRUSTWORTHY)
    assert rows["excluded"].tolist() == [block.flags == () for block in of_blocks(record)]
    calm = frame.launches(frame.blocks([half_watched([1.0] * 4)], exclude=frame.UNTRUSTWORTHY)).iloc[0]
    assert (calm["blocks_used"], calm["blocks_excluded"], calm["sm_clock_mhz"]) == (8, 0, 1980)


def test_the_two_kinds_of_block_balance_and_launches_begin_in_turns() -> None:
    kinds = ["".join("WU"[not has_telemetry(block, launch)] for block in range(8)) for launch in (0, 1)]
    assert kinds == ["WUUWWUUW", "UWWUUWWU"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("measure.watch=sometimes", "measure.watch 'sometimes' is unknown; allowed: always, half"),
        ("measure.blocks=3", "measure.blocks=3: measure.watch=half needs a multiple of 4"),
        ("measure.blocks=2", "measure.blocks=2: measure.watch=half needs a multiple of 4"),
        ("measure.blocks=6", "measure.blocks=6: measure.watch=half needs a multiple of 4"),
    ],
)
def test_what_cannot_be_balanced_is_refused_in_one_line(override: str, message: str) -> None:
    typed = ("measure.watch=half", override)
    with pytest.raises(UsageError) as refused:
        load(*typed[1:] if override.startswith("measure.watch") else typed)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_preset_starts_one_server_and_composes_for_a_cpu_too() -> None:
    (case,) = sweep_cases(load("sweep=watching"))
    assert (case.path, case.plugin, case.workload_settings["measure.watch"]) == ("full", True, "half")
    (tiny,) = sweep_cases(load("sweep=watching", "model=tiny", "gpus=cpu", "concurrency=8", "engine.extra_args=[]"))
    assert tiny.model == "tiny"


def test_cases_that_are_always_watched_keep_their_hash() -> None:
    (always,), (half,) = (
        sweep_cases(load("path=full", "measure.blocks=4", f"measure.watch={w}")) for w in ("always", "half")
    )
    assert "measure.watch" not in always.workload_settings
    assert case_hash(always) != case_hash(half)


@pytest.fixture
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_inside")
def test_half_of_the_blocks_run_without_any_sampler() -> None:
    assert cli.main(["run", *FAKE, "launches=2", "measure.blocks=4"]) == 0
    records = sorted(store.load("latest"), key=lambda record: record.launch.index)
    assert [record.status for record in records] == ["ok", "ok"]
    for record in records:
        for index, block in enumerate(of_blocks(record)):
            watched = has_telemetry(index, record.launch.index)
            assert [bool(device.samples) for device in block.telemetry] == ([True] if watched else [])
            assert flags_of(block) == (() if watched else (NOT_WATCHED,))
    assert cli.main(["show", "latest"]) == 0


@pytest.mark.usefixtures("_inside")
def test_a_planted_cost_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real_step_s, planted = FakeServer._step_s, 0.03

    def step_s(self: FakeServer, requests: Sequence[PromptSpec], batch: int) -> float:
        is_watched = any(thread.name == "telemetry" for thread in threading.enumerate())
        return real_step_s(self, requests, batch) * (1 + planted * is_watched)

    monkeypatch.setattr(FakeServer, "_step_s", step_s)
    assert cli.main(["run", *FAKE, "measure.blocks=24", "tag=dear"]) == 0
    planted = 0.0
    assert cli.main(["run", *FAKE, "measure.blocks=200", "tag=free", "resume=false"]) == 0
    capsys.readouterr()
    assert cli.main(["watching", "dear"]) == 1
    said = capsys.readouterr().out
    assert "cost over 0.5%: watched over not watched 0.97" in said
    assert "12 pairs of blocks" in said
    assert cli.main(["watching", "free", "--strict"]) == 0
    assert "cost under 0.5%" in capsys.readouterr().out


@pytest.mark.usefixtures("_inside")
def test_without_such_records_one_line_says_how_to_make_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "engine=fake", "path=full", "launches=1"]) == 0
    assert cli.main(["watching", "latest"]) == UsageError.exit_code
    assert "prefixbench run sweep=watching" in capsys.readouterr().err
    assert cli.main(["outside", "measure.watch=half", "measure.blocks=4", "--plan-only"]) == UsageError.exit_code
    assert "measure.watch=half: here every block is watched" in capsys.readouterr().err


def test_the_report_shows_the_cost_or_how_to_measure_it() -> None:
    def results(record: Record) -> tuple[list[Table], list[str]]:
        page = build("t", Selected("latest", (record,)))
        assert not any(NOT_WATCHED in warning for warning in page.warnings), "it was asked for"
        (section,) = (section for section in page.sections if section.id == "results")
        tables = [block for block in section.blocks if isinstance(block, Table) and block.id == "watching"]
        return tables, [block.text for block in section.blocks if isinstance(block, Note)]

    (table,), _ = results(half_watched([0.999, 1.0, 1.0, 0.999]))
    ((*_, ratio, interval, pairs, left_out, verdict),) = table.rows
    assert (ratio.text, pairs.text, left_out.text, verdict.text) == ("0.9995×", "4", "0", "under 0.5%")
    assert interval.text == "0.9986× to 1.0004×"
    tables, notes = results(serving_record(path="full"))
    assert not tables
    assert any("prefixbench run sweep=watching" in text for text in notes)
