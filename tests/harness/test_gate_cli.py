"""The verb from end to end on stored records: exit codes, outputs for people and for CI."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from harness.builders import serving_record
from prefixbench.analysis.gate.family import Rule
from prefixbench.analysis.gate.judge import GateConfig
from prefixbench.cli import main as cli
from prefixbench.config.gate import as_mapping, load_config
from prefixbench.errors import StoreError, UsageError
from prefixbench.store import save
from prefixbench.verbs import gate as gate_cli


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Selections base, same (unchanged), slow (a sleep in the decode path) and other (another concurrency)."""
    rng = np.random.default_rng(0)
    for name, factor, concurrency in (("base", 1.0, 8), ("same", 1.0, 8), ("slow", 1.2, 8), ("other", 1.0, 16)):
        for launch in range(5):
            step_s = float(0.01 * factor * np.exp(rng.normal(0, 0.005)))
            record = serving_record("cascade", launch, step_s, launch_id=f"{name}-{launch}", concurrency=concurrency)
            save(record, tmp_path / "runs" / name, {})
    return tmp_path / "runs"


def gate(runs: Path, candidate: str, *more: str) -> int:
    base, other = str(runs / "base"), str(runs / candidate)
    return gate_cli.main(["--baseline", base, "--candidate", other, "--runs", str(runs), *more])


@pytest.mark.parametrize(
    ("candidate", "code", "word"), [("same", 0, "pass"), ("slow", 1, "fail"), ("other", 3, "not comparable")]
)
def test_exit_codes(runs: Path, candidate: str, code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(runs, candidate) == code
    assert f"outcome: {word}" in capsys.readouterr().out


def test_undecided(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(runs, "same", "--min-launches", "6") == 2
    assert "6 of each are needed" in capsys.readouterr().out


def test_outputs_for_ci(runs: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"gate.{kind}" for kind in ("junit", "markdown", "json")}
    gate(runs, "slow", *(word for kind, file in files.items() for word in (f"--{kind}", str(file))))
    suite = ElementTree.parse(files["junit"]).getroot()
    assert int(suite.get("failures", "0")) == len(list(suite.iter("failure"))) >= 1
    assert "## Gate: fail" in files["markdown"].read_text()
    data = json.loads(files["json"].read_text(), parse_constant=pytest.fail)
    assert (data["outcome"], data["exit_code"], len(data["candidate_ids"])) == ("fail", 1, 5)


def test_junit_of_a_refusal_is_an_error(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    gate(runs, "other", "--junit", str(file))
    assert "concurrency: 8" in file.read_text()
    assert ElementTree.parse(file).getroot().get("errors") == "1"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--baseline", "x"], "--baseline and --candidate are needed"),
        (["--basline", "x"], "unrecognized arguments"),
        (["--self-test", "--alpha", "2"], "alpha=2.0: a number between 0 and 0.5"),
        (["--self-test", "--primary", "decode_toks"], "did you mean 'decode_tok_s'?"),
        (["--self-test", "--min-launches", "1"], "one launch has no error bar"),
    ],
)
def test_bad_options_are_one_line_and_not_undecided(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["gate", *arguments]) == 64
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_blocks_are_left_out_by_the_flags_that_are_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gate.json"
    gate(runs, "same", "--exclude", "other-load", "cold-cache", "--json", str(file))
    assert json.loads(file.read_text())["config"]["exclude"] == ["other-load", "cold-cache"]


def test_the_same_records_on_both_sides_are_refused(runs: Path) -> None:
    with pytest.raises(gate_cli.GateUsageError, match="5 records are in both"):
        gate(runs, "base")


def test_an_output_that_cannot_be_written(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written"):
        gate(runs, "same", "--json", str(tmp_path / "missing" / "x.json"))


def test_the_file_says_what_the_code_assumes() -> None:
    assert load_config() == GateConfig()
    assert set(as_mapping(GateConfig())) >= {field.name for field in fields(Rule)}


def test_unknown_settings_are_named(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("alfa: 0.1\n")
    with pytest.raises(UsageError, match="did you mean 'alpha'"):
        load_config(file)
    file.write_text("- a list\n")
    with pytest.raises(UsageError, match="a mapping is needed"):
        load_config(file)


def test_self_test_reports_and_fails_when_out_of_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    assert gate_cli.main(["--self-test", "--draws", "200", "--alpha", "0.4", "--json", str(file)]) == 1
    assert "OUT OF BOUNDS" in capsys.readouterr().out
    assert any(not rate["ok"] for rate in json.loads(file.read_text()))


def test_replay_of_stored_launches(runs: Path) -> None:
    for launch in range(5, 12):
        save(serving_record("cascade", launch, 0.01 + launch * 1e-6, launch_id=f"base-{launch}"), runs / "base", {})
    assert gate_cli.main(["--replay", str(runs / "base"), "--runs", str(runs), "--draws", "300"]) == 0
    with pytest.raises(gate_cli.GateUsageError, match="at least 6 launches"):
        gate_cli.main(["--replay", str(runs / "same"), "--runs", str(runs)])
