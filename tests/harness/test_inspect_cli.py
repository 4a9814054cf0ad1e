"""show, compare and export on stored records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest

from harness.builders import CPU, kernel_record, serving_record
from harness.every_kind import one_of_every_kind
from prefixbench import cli, record
from prefixbench.errors import NotComparableError, StoreError, UsageError
from prefixbench.record import Failure
from prefixbench.store import save
from prefixbench.verbs.records import compare, export, show


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Stock and cascade at two prefixes, three launches; one kernel; one failure."""
    root = tmp_path / "runs"
    for launch in range(3):
        for path, step_s in (("stock", 0.02), ("cascade", 0.01)):
            for prefix in (512, 2048):
                save(serving_record(path, launch, step_s * (1 + 0.01 * launch), prefix_tokens=prefix), root, {})
    save(kernel_record("dense"), root, {})
    failed = replace(serving_record("full", status="oom"), measurement=None, failure=Failure("oom", "no [memory] left"))
    save(failed, root, {})
    return root


def test_show_lists_and_details(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["path=stock,cascade", "--runs", str(runs)]) == 0
    assert capsys.readouterr().out.count("tok/s") == 12
    assert show(["path=cascade", "prefix_len=512", "launch=launch-00", "--runs", str(runs)]) == 0
    detailed = capsys.readouterr().out
    assert "800.0 decode" in detailed
    assert "p50 needs 10 samples" in detailed
    assert "100% cascade" in detailed


def test_show_a_failure_and_a_kernel(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(["status=oom", "--runs", str(runs)])
    assert "failure: oom: no [memory] left" in capsys.readouterr().out
    show(["implementation=dense", "--runs", str(runs)])
    assert "100 us (warm)" in capsys.readouterr().out


SHOWN = {
    "serving": ("llama-3.1-8b full 16384x8", "800 tok/s", "100% dense"),
    "kernel": ("dense 8192x256+0", "100 us (warm)", "dense"),
    "numerics": ("tiny path full 128x2", "log-probabilities of 4 positions", "100% dense"),
    "outside": ("llama-3.1-8b stock+plugin", "317 tok/s by our client, 260 by theirs", "100% dense"),
    "dispatch": ("auto 4096x512+64, 32 groups", "decision 0.2 us, planning 180 us", "dense"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_show_knows_every_kind(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(one_of_every_kind()[kind], tmp_path, {})
    assert show(["--runs", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in SHOWN[kind]:
        assert words in printed


def test_no_kind_is_missing_here() -> None:
    assert SHOWN.keys() == one_of_every_kind().keys() == {kind.kind for kind in get_args(record.Measurement)}


# verb: its further words, its exit codes for good records and for failed ones
READERS = {
    "show": ((), 0, 0),
    "scorecard": ((), 0, 0),
    "regret": ((), 2, 2),
    "export": (("-o", "{folder}/table.csv"), 0, 2),
    "report": (("-o", "{folder}/report"), 0, 0),
    "targets": (("engine",), 1, 1),
}


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("failed", [False, True], ids=["ok", "failed"])
def test_every_reading_verb_reads_every_kind(verb: str, failed: bool, tmp_path: Path) -> None:
    """Or refuses in one line; a KeyError is neither. Two launches, so that intervals are made as well."""
    for launch in range(2):
        for made in one_of_every_kind(launch).values():
            broken = replace(made, status="failed", measurement=None, failure=Failure("failed", "it broke"))
            save(broken if failed else made, tmp_path / "runs", {})
    words, *codes = READERS[verb]
    arguments = [word.format(folder=tmp_path) for word in words]
    assert cli.main([verb, *arguments, "--runs", str(tmp_path / "runs")]) == codes[failed]


def test_compare_two_paths_is_paired(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(["path=stock", "path=cascade", "--runs", str(runs)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2.000 (2.000 to 2.000, n=3)") == 2


def test_compare_refuses_other_batches_and_names_other_machines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for launch in range(3):
        halved = {"batch_histogram": {4: 128}}
        save(serving_record("dense", launch, counter_changes=halved, prefix_tokens=512, environment=CPU), runs, {})
    assert compare(["path=stock prefix_len=512", "path=dense", "--runs", str(runs)]) == 3
    printed = capsys.readouterr().out
    assert "refused: realized batch: 8 and 4" in printed
    assert "differs: GPU: NVIDIA H200 in the first, none in the second" in printed


def test_compare_without_a_common_point(runs: Path) -> None:
    with pytest.raises(NotComparableError, match="no point in common"):
        compare(["path=stock prefix_len=512", "path=cascade prefix_len=2048", "--runs", str(runs)])
    with pytest.raises(UsageError, match="did you mean 'decode_tok_s'"):
        compare(["path=stock", "path=cascade", "--metrics", "decode_toks", "--runs", str(runs)])


@pytest.mark.parametrize(("level", "rows"), [("launch", 12), ("block", 12), ("request", 96), ("kernel", 1)])
def test_export_both_formats(runs: Path, tmp_path: Path, level: str, rows: int) -> None:
    for name, read in (("t.csv", pd.read_csv), ("t.parquet", pd.read_parquet)):
        file = tmp_path / name
        assert export([str(runs), "--runs", str(runs), "-o", str(file), "--level", level]) == 0
        assert len(read(file)) == rows


def test_export_says_what_is_wrong(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the ending decides"):
        export([str(runs), "--runs", str(runs), "-o", str(tmp_path / "t.xlsx")])
    with pytest.raises(UsageError, match="no row at level 'kernel'"):
        export(["path=stock", "--runs", str(runs), "-o", str(tmp_path / "t.csv"), "--level", "kernel"])
    with pytest.raises(StoreError, match="could not be written"):
        export([str(runs), "--runs", str(runs), "-o", str(tmp_path / "no" / "t.csv")])
