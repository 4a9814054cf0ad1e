"""Sweeps on the fake engine: records for good and failed points (O38), resume (O42), one line of refusal when busy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixbench import cli, store
from prefixbench.case import ServingCase
from prefixbench.engines.base import SendPlan, ServerFailedError
from prefixbench.engines.fake import FakeEngine, FakeServer
from prefixbench.errors import EngineError
from prefixbench.machine import lock
from prefixbench.record import Record, RequestSample, ServingMeasurement
from prefixbench.workloads import PromptSpec
from record_factory import flags_of

SIX_POINTS = ("engine=fake", "path=cascade", "prefix_len=64,128,256,512,1024,2048", "launches=1", "measure.blocks=1")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*overrides: str) -> int:
    return cli.main(["run", *overrides, "-m"])


def by_prefix(records: Sequence[Record]) -> dict[int, str]:
    return {r.case.prefix_tokens: r.status for r in records}


def test_sweep_records_every_case_and_launch(capsys: pytest.CaptureFixture[str]) -> None:
    paths = "path=stock,cascade,full"
    typed = ("engine=fake", "prefix_len=64,2048", "concurrency=8,32", paths, "launches=3", "tag=all")
    assert run(*typed) == 0
    records = store.load("all")
    assert len(records) == 2 * 2 * (3 + 1) * 3
    assert len({r.launch.launch_id for r in records}) == 6, "one server serves every case that it can"
    for record in records:
        assert isinstance(record.case, ServingCase)
        assert isinstance(record.measurement, ServingMeasurement)
        assert record.status == "ok"
        assert record.overrides == typed
        assert record.config["prefix_len"] == [64, 2048]
        assert (record.measurement.placement is not None) is record.case.plugin
        assert (record.measurement.blocks[0].counters is not None) is record.case.plugin
        assert len(record.measurement.blocks) == 3
        assert "fake-engine" in record.labels
        assert not any(flags_of(block) for block in record.measurement.blocks)
        folder = Path("runs", record.record_id)
        assert {path.name for path in folder.iterdir()} == {"record.json", "config.yaml", "overrides.txt", "server.log"}
    by_launch: dict[str, list[int]] = {}
    for record in records:
        by_launch.setdefault(record.launch.launch_id, []).extend(b.position for b in record.measurement.blocks)
    assert all(sorted(positions) == list(range(len(positions))) for positions in by_launch.values())
    assert "48 points recorded, 0 failed" in capsys.readouterr().out


def test_failing_points_are_records_and_the_sweep_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_send = FakeServer.send
    broken = True

    def send(self: FakeServer, requests: Sequence[PromptSpec], how: SendPlan) -> tuple[RequestSample, ...]:
        samples = real_send(self, requests, how)
        prefix = len(requests[0].input_ids) - 32
        if broken and prefix == 256:
            raise ServerFailedError("the server ended with code -9: CUDA out of memory", "oom", "the log")
        if broken and prefix == 1024:
            lost = RequestSample(0.0, (), len(requests[0].input_ids), None, 0, "usage", None, "connection reset")
            return (*samples[:-3], lost, lost, lost)
        return samples

    monkeypatch.setattr(FakeServer, "send", send)
    assert run(*SIX_POINTS, "concurrency=100") == 1
    records = store.load("latest")
    statuses = {64: "ok", 128: "ok", 256: "oom", 512: "ok", 1024: "partial", 2048: "ok"}
    assert by_prefix(records) == statuses
    partial = next(r for r in records if r.status == "partial")
    assert partial.failure is not None
    assert partial.failure.message == "3 of 100 requests failed"
    assert flags_of(partial.measurement.blocks[0]) == ("failed-requests",)
    out = capsys.readouterr().out
    assert "6 points recorded, 2 failed" in out
    assert "oom: the server ended with code -9: CUDA out of memory" in out
    assert "partial: 3 of 100 requests failed" in out

    broken = False
    kept = {r.record_id: Path("runs", r.record_id, "record.json").stat().st_mtime_ns for r in records}
    assert run(*SIX_POINTS, "concurrency=100") == 0
    again = {r.record_id for r in store.load("latest")}
    assert len(again) == 6
    assert len(again - set(kept)) == 2, "only the two failed points are measured again"
    assert all(Path("runs", i, "record.json").stat().st_mtime_ns == at for i, at in kept.items())


def test_a_server_that_never_starts_fails_its_cases_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = []

    def begin(self: FakeEngine, plugin: bool, seed: int, log: Path) -> FakeServer:
        starts.append(plugin)
        if plugin:
            raise ServerFailedError("the server ended with code 1: prefixonce: MLA is not supported")
        return FakeServer(plugin, seed, log, 0.0)

    monkeypatch.setattr(FakeEngine, "begin", begin)
    monkeypatch.setattr(FakeServer, "log_tail", lambda self: "")
    assert run("engine=fake", "path=stock,full", "launches=2") == 1
    assert starts.count(True) == 1, "not started again in this run"
    assert [r.status for r in store.load("plugin=true")] == ["failed", "failed"]
    assert len(store.load("plugin=false status=ok")) == 2
    assert "MLA is not supported" in capsys.readouterr().out


def test_two_servers_side_by_side_take_turns_in_one_launch() -> None:
    assert run("engine=fake", "path=stock,full", "launches=3", "engine.side_by_side=true", "measure.blocks=2") == 0
    records = store.load("latest")
    assert len(records) == 9
    for launch in {r.launch.launch_id for r in records}:
        together = [r for r in records if r.launch.launch_id == launch]
        assert {(r.case.path, r.case.plugin) for r in together} == {("stock", True), ("full", True), ("stock", False)}
        assert sorted(b.position for r in together for b in r.measurement.blocks) == list(range(6))


def test_one_of_two_servers_that_never_starts_leaves_the_other_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(self: FakeServer) -> None:
        if self._plugin:
            raise ServerFailedError("the server ended with code 1")

    monkeypatch.setattr(FakeServer, "ready", ready)
    assert run("engine=fake", "path=stock,full", "launches=2", "engine.side_by_side=true") == 1
    assert [r.status for r in store.load("plugin=true")] == ["failed", "failed"]
    assert [r.status for r in store.load("plugin=false")] == ["ok", "ok"]


def test_changing_axis_order_or_more_launches_measures_only_what_is_missing() -> None:
    assert run("engine=fake", "path=stock,full", "prefix_len=64,128", "launches=1") == 0
    first = {r.record_id for r in store.load("runs")}
    assert run("prefix_len=128,64", "launches=1", "path=full,stock", "engine=fake") == 0
    assert {r.record_id for r in store.load("runs")} == first
    assert run("engine=fake", "path=stock,full", "prefix_len=64,128,256", "launches=2") == 0
    records = store.load("runs")
    assert len(records) == 3 * 3 * 2
    assert {r.record_id for r in records} > first
    indices: dict[str, list[int]] = {}
    for record in records:
        indices.setdefault(record.case_hash, []).append(record.launch.index)
    assert all(sorted(found) == [0, 1] for found in indices.values())


def test_hydras_own_folder_may_lie_elsewhere(tmp_path: Path) -> None:
    typed = ("engine=fake", "path=full", "launches=1", f"hydra.sweep.dir={tmp_path}/elsewhere")
    assert run(*typed) == 0
    assert run(*typed) == 0, "what was reused is found although Hydra writes elsewhere"
    assert len(store.load("latest")) == 1


def test_resume_false_measures_again_beside_what_is_there() -> None:
    for _ in range(2):
        assert run("engine=fake", "path=full", "launches=1", "resume=false") == 0
    assert len(store.load("runs")) == 2
    assert len(store.load("latest")) == 1


def test_records_of_another_plugin_source_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("engine=fake", "path=stock,full", "launches=1") == 0
    monkeypatch.setattr(FakeEngine, "plugin_source", lambda self: "edited")
    assert run("engine=fake", "path=stock,full", "launches=1") == 0
    assert len(store.load("plugin=true")) == 4
    assert len(store.load("plugin=false")) == 1, "the baseline does not depend on the plugin"


def test_all_failures_of_all_jobs_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(self: FakeEngine, plugin: bool, seed: int, log: Path) -> FakeServer:
        raise ServerFailedError(f"no server {plugin}")

    monkeypatch.setattr(FakeEngine, "begin", begin)
    assert run("engine=fake", "path=stock,full", "engine.page_size=1,16", "launches=1") == 1
    out = capsys.readouterr().out
    assert "6 points recorded, 6 failed" in out
    assert out.count("  failed: ") == 6


def test_a_busy_device_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "resources", ("test-device",))
    with lock.hold(("test-device",)):
        assert cli.main(["run", "engine=fake", "path=full"]) == EngineError.exit_code
    err = capsys.readouterr().err
    assert "test-device is being measured by process" in err
    assert err.count("\n") == 1
    assert store.load("runs") == []
    assert cli.main(["run", "engine=fake", "path=full"]) == 0, "the lock ends with its holder"


def test_a_cold_cache_everywhere_fails_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "prime", lambda self, prompt: None)
    assert run("engine=fake", "path=full", "launches=1") == 1
    (record,) = store.load("runs")
    assert record.failure is not None
    assert (record.status, record.failure.kind) == ("failed", "cold-cache")
    assert all("cold-cache" in block.flags for block in record.measurement.blocks)
