"""Hardware counters: ncu's list of launches cut into cases, its failures as reasons; workers as real processes."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefixbench.measures.kernel.counters import count_traffic, cut_into_cases
from prefixbench.measures.kernel.inputs import Shape
from prefixbench.measures.kernel.worker import Job
from prefixbench.measures.kernel.worker_process import compile_ahead, run_worker
from prefixbench.record import Traffic

SHAPE = Shape(32, 4, 2, 2, 1, 16, 16, "bfloat16", "shared-contiguous")
JOB = Job((("dense", SHAPE), ("nope", SHAPE), ("paged", SHAPE)), profile=False, budget_s=60.0, seed=1, device="cpu")

HEADER = (
    '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum",'
    '"lts__t_sectors_op_read.sum","lts__t_sectors_op_write.sum"'
)
UNITS = '"","","","byte","byte","sector","sector"'
MARKER = '"void at::cuda::(anonymous namespace)::spin_kernel(long)"'


def launch(number: int, name: str, read: str, written: str, sectors: str, sectors_written: str) -> str:
    return f'"{number}","7",{name},"{read}","{written}","{sectors}","{sectors_written}"'


REPORT = "\n".join(
    [
        "==PROF== Connected to process 7",
        HEADER,
        UNITS,
        launch(0, MARKER, "999", "999", "999", "999"),
        launch(1, '"prefix_kernel"', "33,554,432", "1,024", "1,048,576", "32"),
        launch(2, '"merge_kernel"', "1,000", "2,000", "100", "10"),
        launch(3, MARKER, "999", "999", "999", "999"),
        launch(4, '"paged_kernel"', "500", "5", "50", "1"),
    ]
)


def test_launches_are_summed_between_markers_which_do_not_count() -> None:
    assert list(cut_into_cases(REPORT)) == [
        Traffic("ncu", 33_555_432, 3_024, 32 * 1_048_676, 32 * 42),
        Traffic("ncu", 500, 5, 1_600, 32),
    ]


def test_a_report_without_launches_is_empty() -> None:
    assert list(cut_into_cases("==ERROR== The user does not have permission")) == []
    assert list(cut_into_cases("")) == []


def fake_ncu(folder: Path, body: str) -> str:
    """A program in ncu's place: runs the worker it is given, then does `body` with `log` as the path of its report."""
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys, time, pathlib\n"
        "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
        "assert sys.argv[sys.argv.index('--clock-control') + 1] == 'none'\n"
        f"worker = sys.argv[sys.argv.index({sys.executable!r}):]\n"
        f"{body}\n"
    )
    script.chmod(0o755)
    return str(script)


def test_counts_go_to_the_cases_that_ran_and_reasons_to_the_others(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, f"subprocess.run(worker, check=True)\nlog.write_text({REPORT!r})")
    counted = count_traffic(JOB, ncu)
    assert [traffic is not None for traffic in counted.traffic] == [True, False, True]
    assert counted.traffic[2] == Traffic("ncu", 500, 5, 1_600, 32)
    assert counted.reasons[0] is None
    assert counted.reasons[1] is not None
    assert "'nope' is unknown" in counted.reasons[1]


def test_a_profiler_that_may_not_count_is_a_reason(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "subprocess.run(worker, check=True)\nlog.write_text('==ERROR== ERR_NVGPUCTRPERM')")
    counted = count_traffic(JOB, ncu)
    assert counted.traffic == (None, None, None)
    assert counted.reasons[0] == "ncu counted 0 of 2 cases: ==ERROR== ERR_NVGPUCTRPERM"


def test_without_a_profiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert count_traffic(JOB).reasons == ("ncu is not on the PATH",) * 3


def test_a_profiler_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixbench.measures.kernel.counters._GRACE_S", 0.5)
    ncu = fake_ncu(tmp_path, "subprocess.run(['sleep', '60'])")
    start_s = time.monotonic()
    counted = count_traffic(replace(JOB, budget_s=0.5), ncu)
    assert time.monotonic() - start_s < 20
    assert counted.reasons[0] == "ncu did not finish within 1 s"


def test_a_worker_reports_each_case_and_goes_on_after_a_failure() -> None:
    ran = run_worker(JOB, timeout_s=120)
    assert ran.returncode == 0
    assert (ran.reports[0], ran.reports[2]) == (None, None)
    assert "'nope' is unknown" in str(ran.reports[1])


def test_a_worker_begins_nothing_after_its_budget() -> None:
    ran = run_worker(replace(JOB, budget_s=-1.0), timeout_s=120)
    assert all("time budget" in str(error) for error in ran.reports.values())


def test_compiling_ahead_complains_by_implementation() -> None:
    """Without a GPU every worker fails at once, and says so instead of raising."""
    complaints = compile_ahead([("dense", SHAPE), ("nope", SHAPE)], 1, timeout_s=120)
    assert "'nope' is unknown" in complaints["nope"]
    assert ("dense" in complaints) is not torch.cuda.is_available()
