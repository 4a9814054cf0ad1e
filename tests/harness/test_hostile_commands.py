"""What people and machines get wrong on the command line: one line that says what, an exit code, nothing lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders import serving_record
from harness.every_kind import one_of_every_kind
from prefixbench import cli, store
from prefixbench.errors import StoreError
from prefixbench.output import write_whole

FAKE = ("engine=fake", "runs=r", "launches=1", "measure.blocks=1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) in (2, 4, 64)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    "words",
    [
        ("dispatch", "device=cuda"),
        ("kernels", "kernels=smoke", "device=cuda"),
        ("numerics", "numerics=one-gpu"),
        ("soak", "soak=one-gpu"),
    ],
    ids=lambda words: words[0],
)
def test_a_job_that_finds_no_gpu_ends_in_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(list(words)) in (2, 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "gpus=cpu" in line or "device=cpu" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=null", "model 'null' is unknown; allowed: llama"),
        ("path=null", "path 'null' is unknown"),
        ("model.kv_heads=0", "model.kv_heads=0: must be at least 1"),
        ("model.heads=7", "must be a multiple of model.kv_heads"),
        ("model.name=''", "model.name is blank"),
        ("model.dtype=int3", "model.dtype 'int3' is unknown"),
        ("engine.mem_fraction_static=nan", "engine.mem_fraction_static=nan: a finite number"),
        ("engine.mem_fraction_static=7", "must be below 1"),
        ("engine.stall_timeout_s=0", "engine.stall_timeout_s=0: must be above 0"),
        ("engine.max_total_tokens=100", "576 tokens, more than the KV pool of engine.max_total_tokens=100"),
        ("engine.max_total_tokens=0", "must be at least 1, or null"),
        ("engine.chunked_prefill_size=-3", "at least 1, -1 or null"),
        ("measure.telemetry_interval_s=0", "must be at least 0.001"),
        ("measure.blocks=1000000000000", "at most 10000"),
        ("seed=99999999999999999999", "seed=99999999999999999999: must be from 0"),
        ("launches=1.5", "launches=1.5: launches: Value '1.5' of type 'float' could not be converted to Integer"),
        ("workload.settings.requests=[1]", "workload.settings.requests=[1]: one value"),
        ("workload.settings.requests=inf", "workload.settings.requests=inf: a finite number"),
        ("tag=latest", "tag='latest' could not be selected"),
        ("tag='a b'", "tag='a b' could not be selected"),
        ("tag='x=y'", "could not be selected"),
        ("runs=''", "runs='' is no folder"),
        ("runs=/dev/null", "runs='/dev/null' is no folder"),
        ("hydra.job.chdir=true", "hydra.job.chdir"),
        ("tag=\udcff", "no text in this locale"),
        ("tag=${oc.env:NOT_SET_ANYWHERE}", "'NOT_SET_ANYWHERE' not found"),
        ("--config-dir=nowhere", "--config-dir nowhere: there is no such folder"),
        ("--config-name=nowhere", "--config-name 'nowhere' is unknown"),
        ("--nonsense", "unrecognized arguments: --nonsense; --help shows what is allowed"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused_in_one_line(
    override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "run", *FAKE, override)
    assert not Path("r").exists(), "something was measured"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", *FAKE, "prefix_len=glob(*)", "-m"), "glob() picks options of a group"),
        (("run", *FAKE, "seed=range(1,1)", "-m"), "this sweep has no point"),
        (("run", *FAKE, "workload=rollouts", "workload.settings.prompts=0"), "prompts, samples"),
        (("numerics", "model=null"), "model 'null' is unknown"),
        (("kernels", "telemetry_interval_s=nan"), "telemetry_interval_s=nan: a finite number"),
        (("dispatch", "batch=[8,8]"), "each only once"),
        (("soak", "minutes=inf"), "minutes=inf: a finite number"),
        (("outside", "--tolerance", "nan", "--plan-only"), "--tolerance nan"),
        (("report", "--nonsense"), "unrecognized arguments: --nonsense; see prefixbench report --help"),
        (("gate", "--self-test", "--draws", "0"), "--draws 0: must be at least 1"),
        (("predict", f"prefix_len={'9' * 5000}"), "whole numbers from 0 on are needed"),
        (("regret", "r", "--at-most", "nan"), "--at-most nan: a share from 0"),
        (("show", "path="), "has a value that is empty"),
        (("show", "path=stock", "path=full"), "filter 'path' is given twice"),
        (("targets", "engine", "--file", "bytes"), "bytes: "),
        (("gate", "--config", "bytes"), "bytes: "),
        (("fragmentation", "--hours", "nan"), "and finite"),
    ],
)
def test_every_verb_refuses_in_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    assert said in refused(capsys, *words)


def test_a_tag_that_names_nothing_new_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *FAKE, "path=[full]"]) == 0
    assert "resume=false" not in capsys.readouterr().out
    assert cli.main(["run", *FAKE, "path=[full]", "tag=second"]) == 0
    assert "1 of them were there before, under no such tag; resume=false" in capsys.readouterr().out


def test_a_folder_with_spaces_is_one_selector_and_quoted_words_are_several() -> None:
    folder = Path("a b", "x=[1], ü")
    made = [store.save(serving_record(path), folder, {}) for path in ("stock", "full")]
    assert len(store.load([str(folder)])) == len(made)
    assert [r.case.path for r in store.load([str(folder), "path=full model=llama-3.1-8b"])] == ["full"]  # type: ignore[union-attr]
    assert [r.case.path for r in store.load("path=stock", folder)] == ["stock"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":"1"')),
        lambda path: path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":0')),
        lambda path: path.write_text(path.read_text().replace('"prefix_tokens":16384', '"prefix_tokens":8192')),
        lambda path: path.write_text(path.read_text().replace("launch-00", "launch-99", 1)),
        lambda path: path.write_text(path.read_text().replace('"concurrency":8', '"concurrency":0')),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[1]"),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
        lambda path: shutil.copytree(path.parent, path.parent.with_name("copied")),
    ],
)
def test_a_record_that_is_none_or_is_there_twice_is_left_out_with_one_line(spoil: object) -> None:
    path = store.save(serving_record(), Path("r"), {}) / store.RECORD_FILE
    other = serving_record("full")
    store.save(other, Path("r"), {})
    assert callable(spoil)
    spoil(path)
    reading = store.read_tree(Path("r"))
    assert len(reading.problems) == 1
    assert "it is left out" in reading.problems[0]
    assert other in reading.records
    assert len(reading.records) == 1 + path.parent.with_name("copied").exists()


def test_records_without_a_sample_are_shown_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"kernel": "timings", "outside": "pairs", "dispatch": "decision_us", "serving": "blocks"}
    for kind, record in one_of_every_kind().items():
        if kind in nothing:
            measured = replace(record.measurement, **{nothing[kind]: ()})  # type: ignore[type-var,arg-type]
            store.save(replace(record, measurement=measured), Path("r"), {})
    assert cli.main(["show", "r"]) == 0
    assert cli.main(["report", "r", "-o", "report"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_whole(Path("report.json"), "old") or Path("report.json")
    record = serving_record()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="could not be written below r: No space left on device"):
        store.save(record, Path("r"), {})
    assert not [path for path in Path("r").rglob("*") if path.is_file()]
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match=r"report\.json could not be written"):
        write_whole(old, "new")
    assert [path.read_text() for path in Path().glob("*report.json*")] == ["old"]


def test_what_is_no_file_is_written_to_and_a_link_stays_one() -> None:
    Path("link").symlink_to("target")
    write_whole(Path("link"), "text ü \ud83d")
    write_whole(Path("/dev/null"), "text")
    assert Path("link").is_symlink()
    assert Path("target").read_text("utf-8") == "text ü ?"
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{run} show r > /dev/full", 4, "No space left on device"),
        ("{run} show r >&-", 0, ""),
        ("{run} show r | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}", None, ""),
        ("PYTHONIOENCODING=ascii {run} report r -o out", 0, ""),
    ],
)
def test_streams_and_folders_that_fail(shell: str, code: int | None, said: str) -> None:
    store.save(serving_record(model="tïny — model", path="full"), Path("r"), {})
    command = shell.format(run=f"{sys.executable} -P -m prefixbench.cli")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert code is None or ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == bool(said)


def test_a_current_folder_that_is_gone_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Path("gone").absolute()
    gone.mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(gone)
        gone.rmdir()
        assert "does not exist any more" in refused(capsys, "show", "r")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_keeps_what_it_has(number: signal.Signals) -> None:
    words = ["run", *FAKE, "path=[stock]", "prefix_len=[64,128,256]", "engine.extra_args=['latency_s=0.5']"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-m", "prefixbench.cli", *words], env=environment, stderr=subprocess.PIPE)
    while not list(Path().glob("r/*/*/record.json")):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    _, error = run.communicate(timeout=20)
    assert run.returncode == 130
    assert error.decode().startswith("prefixbench: interrupted")
    assert not list(Path("r").rglob(".writing-*"))
    assert store.read_tree(Path("r")).problems == ()
