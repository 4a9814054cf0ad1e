"""Hardware-counter traffic of whole cases by Nsight Compute, run over a worker process; clocks are left alone.

Each launch is measured with a flushed cache (ncu's default), so these are the bytes of a launch that finds the L2 cold.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from prefixbench.measures.kernel.worker import MARKER_KERNEL, Job
from prefixbench.measures.kernel.worker_process import Ran, run_worker
from prefixbench.record import Traffic

SECTOR_BYTES = 32
_METRICS = {
    "dram__bytes_read.sum": 1,
    "dram__bytes_write.sum": 1,
    "lts__t_sectors_op_read.sum": SECTOR_BYTES,
    "lts__t_sectors_op_write.sum": SECTOR_BYTES,
}
_GRACE_S = 60.0  # the profiler writes its report after the worker's last case


@dataclass(frozen=True)
class Counted:
    """`traffic[i]` is of case i of the job, None where `reasons[i]` says why it was not counted."""

    traffic: tuple[Traffic | None, ...]
    reasons: tuple[str | None, ...]


def count_traffic(job: Job, ncu: str | None = None) -> Counted:
    """Counts what it can within `job.budget_s`; a missing or failing profiler is a reason, not an error."""
    binary = ncu or shutil.which("ncu")
    if binary is None:
        return _none(job, "ncu is not on the PATH")
    job = replace(job, profile=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        command = [binary, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--metrics", ",".join(_METRICS), "--clock-control", "none", "--profile-from-start", "off"]
        ran = run_worker(job, command, timeout_s=job.budget_s + _GRACE_S)
        text = log.read_text() if log.exists() else ""
    if ran.returncode is None:
        return _none(job, f"ncu did not finish within {job.budget_s + _GRACE_S:.0f} s")
    profiled = [i for i, error in sorted(ran.reports.items()) if error is None]
    launches = list(cut_into_cases(text))
    if len(launches) != len(profiled) or not profiled:
        return _none(job, f"ncu counted {len(launches)} of {len(profiled)} cases: {_why(ran, text)}")
    traffic: list[Traffic | None] = [None] * len(job.cases)
    for i, counted in zip(profiled, launches, strict=True):
        traffic[i] = counted
    reasons = tuple(ran.reports.get(i, "the worker ended before it") for i in range(len(job.cases)))
    return Counted(tuple(traffic), reasons)


def cut_into_cases(text: str) -> Iterator[Traffic]:
    """ncu's wide CSV (one row per launch, a row of units below the header) -> the sum over each case's launches.

    A case begins with the marker kernel, which is not part of it.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if "Kernel Name" in line and line.startswith('"ID"')), None)
    if header is None:
        return
    sums: dict[str, int] | None = None
    for row in csv.DictReader(lines[header:]):
        if not (row["ID"] or "").isdigit():
            continue  # the row of units
        if MARKER_KERNEL in row["Kernel Name"]:
            if sums is not None:
                yield _traffic(sums)
            sums = dict.fromkeys(_METRICS, 0)
        elif sums is not None:
            for metric, unit_bytes in _METRICS.items():
                sums[metric] += round(float(row[metric].replace(",", "")) * unit_bytes)
    if sums is not None:
        yield _traffic(sums)


def _traffic(sums: dict[str, int]) -> Traffic:
    return Traffic("ncu", *(sums[metric] for metric in _METRICS))


def _none(job: Job, reason: str) -> Counted:
    return Counted((None,) * len(job.cases), (reason,) * len(job.cases))


def _why(ran: Ran, text: str) -> str:
    said = [line for line in (*text.splitlines(), *ran.stderr.splitlines()) if "ERROR" in line or "rror:" in line]
    return said[-1].strip()[:300] if said else f"it exited with {ran.returncode}"
