"""Starts workers and ends them for good: a profiler's child would outlive a plain kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefixbench.measures.kernel.inputs import Shape
from prefixbench.measures.kernel.worker import Job

_MODULE = "prefixbench.measures.kernel.worker"


@dataclass(frozen=True)
class Ran:
    """`reports` are case index -> error (None: it ran), for the cases reached. `returncode` None: it was killed."""

    returncode: int | None
    reports: dict[int, str | None]
    stderr: str


def run_worker(job: Job, prefix: Sequence[str] = (), *, timeout_s: float) -> Ran:
    """Runs one worker under `prefix` (a profiler's command line) and waits for it, at most `timeout_s`."""
    return _finish(_start(job, prefix), time.monotonic() + timeout_s)


def compile_ahead(cases: Sequence[tuple[str, Shape]], seed: int, *, timeout_s: float) -> Mapping[str, str]:
    """Runs every implementation's cases once, one worker per implementation side by side, so that what they compile is
    on disk when it is timed or profiled. Returns the complaints by implementation; they are no failures yet."""
    names = dict.fromkeys(name for name, _ in cases)
    job = Job((), profile=False, budget_s=timeout_s, seed=seed)
    workers = {name: _start(replace(job, cases=tuple(case for case in cases if case[0] == name)), ()) for name in names}
    deadline_s = time.monotonic() + timeout_s
    complaints = {}
    for name, process in workers.items():
        ran = _finish(process, deadline_s)
        errors = [error for error in ran.reports.values() if error]
        if ran.returncode is None:
            errors.append(f"still compiling after {timeout_s:.0f} s")
        elif ran.returncode:
            errors.append(f"its process ended with {ran.returncode}: {ran.stderr.strip()[-300:]}")
        if errors:
            complaints[name] = errors[-1]
    return complaints


def _start(job: Job, prefix: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # The child must find both packages also when this process was started from a checkout.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    process.stdin.write(job.to_json())
    process.stdin.close()
    process.stdin = None  # communicate() would flush it again
    return process


def _finish(process: subprocess.Popen[str], deadline_s: float) -> Ran:
    try:
        stdout, stderr = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        returncode: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        returncode = None
    reports = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"index"')]
    return Ran(returncode, {report["index"]: report["error"] for report in reports}, stderr)
