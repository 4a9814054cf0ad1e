"""The verb on stored records: a row for every claim, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.builders import CPU, serving_record
from prefixbench.analysis.claims.reported import CLAIM_IDS
from prefixbench.analysis.claims.scorecard import scorecard
from prefixbench.errors import StoreError, UsageError
from prefixbench.report.sections.scorecard import scorecard_section
from prefixbench.report.view import Table
from prefixbench.store import save
from prefixbench.verbs import scorecard as scorecard_cli


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for path, step_s in (("stock", 0.02), ("cascade", 0.01)):
        save(serving_record(path, 0, step_s, environment=CPU, labels=("cpu",)), tmp_path / "runs", {})
    return tmp_path / "runs"


def test_every_claim_is_printed(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    assert scorecard_cli.main([str(runs), "--runs", str(runs), "--json", str(file), "--records"]) == 0
    printed = capsys.readouterr().out
    assert all(claim_id in printed for claim_id in CLAIM_IDS)
    assert "14 not run here" in printed
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [row["claim_id"] for row in rows] == list(CLAIM_IDS)
    assert all(row["why"] for row in rows)


def test_strict_fails_while_a_claim_is_open(runs: Path) -> None:
    assert scorecard_cli.main([str(runs), "--runs", str(runs), "--strict"]) == 1


def test_errors_are_one_line(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no record matches"):
        scorecard_cli.main(["path=dense", "--runs", str(runs)])
    with pytest.raises(StoreError, match="could not be written"):
        scorecard_cli.main([str(runs), "--runs", str(runs), "--json", str(tmp_path / "no" / "x.json")])


def test_the_section_shows_the_reported_machine_on_paper_and_calls_it_a_model() -> None:
    section = scorecard_section(scorecard([]))
    paper = next(block for block in section.blocks if isinstance(block, Table) and block.id == "on-paper")
    assert "a model, ceilings only, nothing fitted or measured" in paper.caption
    rows = {row[0].text: row for row in paper.rows}
    assert rows["K2 paged launch (bytes)"][3].value == pytest.approx(256 * 2 * 8192 * 8 * 128 * 2, rel=1e-3)
    assert rows["R1 stock (tok/s)"][2].value == pytest.approx(1360)
    assert rows["R1 stock (tok/s)"][4].value == pytest.approx(1360 / rows["R1 stock (tok/s)"][3].value - 1)
