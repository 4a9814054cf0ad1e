"""The harness on real SGLang with the CPU platform: the path asked for is the path that ran, from a warm cache."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from plugin.engine_host import Server, Zygote, quick_start
from prefixbench import cli, store
from prefixbench.engines import sglang
from prefixbench.engines.process import ServerProcess
from prefixbench.record import Record, ServingMeasurement
from record_factory import flags_of

ARGUMENTS = (
    *("path=[stock,cascade,full]", "prefix_len=256", "suffix_len=8", "output_len=6", "concurrency=4", "launches=1"),
    *("measure.blocks=1", "measure.warmup_blocks=0", "engine.dense_m_eff=16"),
)
RAN = {"stock": "stock", "cascade": "cascade", "full": "dense"}


@pytest.mark.engine
def test_one_server_with_and_one_without_the_plugin(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess | Server:
        """The server with the plugin as users start it; the other one forked, which saves three imports of SGLang."""
        if "prefixonce" in command:
            return ServerProcess(command, environment, log)
        (launch,) = (position for position, word in enumerate(command) if word == "sglang.launch_server")
        return zygote.server(command[launch + 1 :], env=environment)

    monkeypatch.setattr(sglang, "ServerProcess", start)
    monkeypatch.chdir(tmp_path)
    # A lock folder of its own: the test checks what ran, not how fast, and must not wait for a measuring run.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in quick_start().items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", *ARGUMENTS]) == 0
    records = store.load("latest", tmp_path / "runs")
    assert sorted((r.case.path, r.case.plugin) for r in records) == [
        ("cascade", True),
        ("full", True),
        ("stock", False),
        ("stock", True),
    ]
    assert len({r.launch.launch_id for r in records}) == 2
    for record in records:
        _check(record)


def _check(record: Record) -> None:
    assert isinstance(record.measurement, ServingMeasurement)
    (block,) = record.measurement.blocks
    assert flags_of(block) == ()
    assert [r.cached_tokens for r in block.requests] == [256] * 4
    assert [(r.output_tokens, r.token_source, r.finish_reason) for r in block.requests] == [(6, "usage", "length")] * 4
    assert (record.launch.startup_s or 0) > 0
    assert {"cpu", "random-weights"} <= set(record.labels)
    if not record.case.plugin:
        assert (block.counters, record.measurement.placement) == (None, None)
        return
    assert block.counters is not None
    assert block.counters.decode_tokens >= 4 * 5
    assert max(block.counters.batch_histogram, key=block.counters.batch_histogram.__getitem__) == 4
    assert set(block.counters.steps) == {RAN[record.case.path]}
    assert record.measurement.placement is not None
    assert record.measurement.placement.contiguous >= 1, "the primed prefix lies in one run"
    assert record.measurement.placement.device_waits == 0, "the host knew every slot that a prefill wrote"
