"""`prefixbench report` on records of a runs folder: files, exit codes, refusals."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from prefixbench import store
from prefixbench.record import Record
from prefixbench.verbs.report import main
from report.synthetic import sweep


def saved(root: Path, records: list[Record]) -> Path:
    for record in records:
        store.save(record, root, {})
    return root


def small(**changes: object) -> list[Record]:
    paths = ("stock", "cascade", "full")
    return sweep(prefixes=(2048,), concurrencies=(8,), launches=2, paths=paths, **changes)  # type: ignore[arg-type]


def test_three_files_from_the_records_that_were_selected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = saved(tmp_path / "runs", small())
    folder = tmp_path / "reports" / "mine"
    assert main(["path=stock,cascade", "-o", str(folder), "--runs", str(root)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "report.json", "report.md"]
    data = json.loads((folder / "report.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    expected = store.load("path=stock,cascade", root)
    assert data["record_ids"] == [record.record_id for record in expected]
    assert len(expected) == 6
    assert "6 records" in capsys.readouterr().out


def test_the_html_asks_for_nothing_outside_itself(tmp_path: Path) -> None:
    root = saved(tmp_path / "runs", small())
    main(["-o", str(tmp_path / "r"), "--runs", str(root), str(root)])
    text = (tmp_path / "r" / "index.html").read_text()
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(text[: text.index("<body>")])
    for attribute in ('src="http', 'href="http', "src='http", "href='http", "@import", "<link", "url(http"):
        assert attribute not in text[: text.index('<script type="application/json"')]


def test_strict_refuses_a_path_that_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = saved(tmp_path / "runs", small(ran={"cascade": {"stock": 64}}))
    arguments = [str(root), "-o", str(tmp_path / "r"), "--runs", str(root)]
    assert main(arguments) == 0
    assert main([*arguments, "--strict"]) == 1
    assert "cascade active on 0% of steps" in capsys.readouterr().err
    assert "cascade active on 0% of steps" in (tmp_path / "r" / "report.md").read_text()
    assert "cascade active on 0% of steps" in (tmp_path / "r" / "index.html").read_text()


def test_strict_passes_when_every_path_ran(tmp_path: Path) -> None:
    root = saved(tmp_path / "runs", small())
    assert main([str(root), "-o", str(tmp_path / "r"), "--runs", str(root), "--strict"]) == 0


def test_an_empty_selection_is_one_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = saved(tmp_path / "runs", small())
    assert main(["model=other", "-o", str(tmp_path / "r"), "--runs", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no record matches 'model=other'" in line
    assert not (tmp_path / "r").exists()


def test_a_typo_in_the_selector_names_what_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["modell=tiny", "-o", str(tmp_path / "r"), "--runs", str(tmp_path)]) == 2
    assert "did you mean 'model'" in capsys.readouterr().err


def test_a_comparison_is_judged_by_the_gate(tmp_path: Path) -> None:
    root = saved(tmp_path / "runs", small())
    assert main([str(root), "-o", str(tmp_path / "r"), "--runs", str(root), "--compare", str(root)]) == 0
    text = (tmp_path / "r" / "report.md").read_text()
    assert "Outcome of the gate:" in text
    assert "simulated launches, not measurements" in text


def test_the_same_records_give_the_same_report(tmp_path: Path) -> None:
    root = saved(tmp_path / "runs", small())
    texts = []
    for name in ("a/r", "b/r"):
        main([str(root), "-o", str(tmp_path / name), "--runs", str(root)])
        data = json.loads((tmp_path / name / "report.json").read_text())
        texts.append({key: value for key, value in data.items() if key != "generated_at"})
    assert texts[0] == texts[1]
