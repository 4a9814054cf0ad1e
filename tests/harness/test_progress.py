"""What is shown while a run works: points done, what failed, and a time left that follows what was measured."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from prefixbench.jobs.progress import Progress
from prefixbench.jobs.sweep import LaunchPlan
from prefixbench.record import Failure
from record_factory import CASE, make_record


def test_points_failures_and_time_left() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    cases = (CASE, replace(CASE, path="full"))
    plans = (LaunchPlan(cases, 0), LaunchPlan(cases, 1))
    progress.begin(plans, 3)
    progress.launch_begins(plans[0], 2)
    progress.point_done(make_record(), 59.6)
    progress.point_done(replace(make_record(path="full"), status="oom", failure=Failure("server", "[1/2] full")), 10.0)
    text = out.getvalue()
    assert "4 points to measure in 2 launches, 3 recorded already" in text
    assert "launch 1 with the plugin: starting a server for 2 points" in text
    # Left after the first: three points at 59.6 s each and one start of 1 s; after the second: its own 10 s are known.
    assert "[1/4] tiny cascade prefix 2048 + 32, 3 out, 2 in flight  ok 59.6 s, about 3 min 00 s left" in text
    assert "oom 10.0 s: [1/2] full, about 1 min 11 s left" in text
