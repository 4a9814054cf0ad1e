"""The harness on real SGLang with the CPU platform: the path asked for is the path that ran, from a warm cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixbench import store
from prefixbench.record import Record, ServingMeasurement
from record_factory import flags_of

COMMAND = (
    *(sys.executable, "-m", "prefixbench.cli", "run", "path=[stock,cascade,full]", "prefix_len=256", "suffix_len=8"),
    *("output_len=6", "concurrency=4", "launches=1", "measure.blocks=1", "measure.warmup_blocks=0"),
    "engine.dense_m_eff=16",
)
RAN = {"stock": "stock", "cascade": "cascade", "full": "dense"}


@pytest.mark.engine
def test_one_server_with_and_one_without_the_plugin(tmp_path: Path) -> None:
    # A lock folder of its own: the test checks what ran, not how fast, and must not wait for a measuring run.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    assert subprocess.run(COMMAND, cwd=tmp_path, env=environment, check=False).returncode == 0
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
    assert (record.launch.startup_s or 0) > 1
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
