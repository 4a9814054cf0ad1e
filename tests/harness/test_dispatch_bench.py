"""`prefixbench dispatch`: every point a record, judged as claim D2, and batches that change as they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.builders import serving_record
from prefixbench import store
from prefixbench.analysis.claims.evidence import Evidence, Finding
from prefixbench.analysis.claims.scorecard import scorecard
from prefixbench.analysis.dispatcher.decisions import decisions, fastest_steps_ms
from prefixbench.case import Change, DispatchCase
from prefixbench.errors import EngineError, UsageError
from prefixbench.measures.dispatch import _Batch
from prefixbench.record import DispatchMeasurement, Record
from prefixbench.verbs import dispatch as dispatch_cli

FEW = ["steps=3", "warmup=1", "device=cpu", "prefix_len=256"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root = tmp_path_factory.mktemp("runs")
    asked = ["mode=[full,stock]", "batch=[1,64]", "groups=[0,2]", f"runs={root}", "tag=mine"]
    assert dispatch_cli.main([*asked, *FEW]) == 0
    return store.load("mine", root)


def test_every_point_becomes_a_record(recorded: list[Record]) -> None:
    assert len(recorded) == 2 * 3 * 3  # two modes; one request alone, and 64 with and without groups
    for record in recorded:
        assert record.status == "ok"
        assert record.labels == ("cpu",)
        measured = record.measurement
        assert isinstance(measured, DispatchMeasurement)
        assert len(measured.decision_us) == len(measured.planning_us) == 3
        assert min(*measured.decision_us, *measured.planning_us) > 0
    paths = {(case.mode, case.groups): m.path_chosen for case, m in map(_parts, recorded)}
    assert paths == {("full", 0): "stock", ("full", 2): "cascade", ("stock", 0): "stock", ("stock", 2): "stock"}


def _parts(record: Record) -> tuple[DispatchCase, DispatchMeasurement]:
    assert isinstance(record.case, DispatchCase)
    assert isinstance(record.measurement, DispatchMeasurement)
    return record.case, record.measurement


def judge(records: list[Record]) -> Finding:
    return next(row.finding for row in scorecard(records) if row.claim_id == "D2")


def timed(record: Record, decision_us: float, change: Change, launch: str = "a") -> Record:
    case, measured = _parts(record)
    return replace(
        record,
        record_id=f"{change}/{launch}",
        case_hash=change,
        case=replace(case, change=change),
        launch=replace(record.launch, launch_id=launch),
        measurement=replace(measured, decision_us=(decision_us,) * 3),
    )


def test_the_claim_is_judged_from_batches_that_stay(recorded: list[Record]) -> None:
    some = recorded[0]
    launches = [timed(some, 0.2 + 0.01 * i, "none", f"launch-{i}") for i in range(3)]
    changed = timed(some, 40.0, "all")
    quick = judge([*launches, changed])
    assert quick.verdict == "reproduced"
    assert "0.21 us" in (quick.measured or "")
    assert "40 us when all were" in (quick.measured or "")
    assert judge([timed(some, 1.2, "none"), changed]).verdict == "differs"
    assert judge([changed]).verdict == "not run here"


def test_planning_is_compared_with_the_fastest_step_of_a_gpu(recorded: list[Record]) -> None:
    served = [serving_record(path, plugin=True, concurrency=64) for path in ("full", "cascade")]
    points = Evidence.of(served).points
    shortest = min(v for p in points for arm in ("full", "cascade") for v in p.sample(arm, "tpot_ms").values())
    assert fastest_steps_ms(points) == {64: shortest}
    finding = judge([timed(recorded[-1], 0.2, "none"), *served])
    assert f"of a step of {shortest:.1f} ms" in (finding.measured or "")


@pytest.mark.parametrize("change", ["none", "one", "all"])
def test_a_batch_changes_as_it_says(change: Change) -> None:
    case = DispatchCase("full", 2, 8, change, 64, 16, 8, 2, 64, {"device": "cpu", "processors": 4})
    (first, lens), (second, later) = islice(_Batch(case).steps(), 2)
    came = sum(row not in first for row in second)
    assert came == {"none": 0, "one": 1, "all": 8}[change]
    assert (first is second) == (change == "none")
    stayed = torch.tensor([row in first for row in second])
    assert (later[stayed] == lens[:1] + 1).all()
    assert len({row.chain[0].node_id for row in second}) == 2


def test_medians_ignore_one_slow_step(recorded: list[Record]) -> None:
    case, measured = _parts(recorded[0])
    slow = replace(recorded[0], case=case, measurement=replace(measured, planning_us=(10.0, 11.0, 900.0)))
    (row,) = decisions([slow]).to_dict("records")
    assert row["planning_us"] == 11.0
    assert row["planning_p99_us"] > 800


@pytest.mark.parametrize(("word", "message"), [
    ("mode=[ful]", "did you mean"), ("steps=1", "steps=1: must be at least 2"), ("q_heads=9", "multiple of kv_heads"),
    ("groups=[600]", "no batch has two rows"), ("change=[some]", "allowed: all, none, one"),
])  # fmt: skip
def test_what_cannot_be_measured_is_said_in_one_line(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dispatch_cli.main([word, f"runs={tmp_path}"])
    assert not store.load([], tmp_path)


def test_a_gpu_that_is_not_there_is_no_cpu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="finds no CUDA GPU"):
        dispatch_cli.main(["device=cuda", f"runs={tmp_path}"])
