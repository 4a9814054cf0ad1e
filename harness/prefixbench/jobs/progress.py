"""What a run shows while it works: each point as it ends, how many are done, and about how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean

from rich.console import Console
from rich.markup import escape

from prefixbench.case import ServingCase
from prefixbench.jobs.sweep import LaunchPlan
from prefixbench.record import Record

_STYLES = {"ok": "green", "partial": "yellow"}


class Progress:
    """Lines for people on `console`; a point is one case in one launch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._todo: list[ServingCase] = []
        self._launches_left = 0
        self._done = self._total = 0
        self._point_s: dict[tuple[object, ...], list[float]] = {}
        self._overhead_s: list[float] = []
        self._launch_began_s: float | None = None

    def begin(self, plans: Sequence[LaunchPlan], reused: int) -> None:
        self._todo = [case for plan in plans for case in plan.cases]
        self._launches_left = len(plans)
        self._done, self._total = 0, len(self._todo)
        already = f", {reused} recorded already" if reused else ""
        self._console.print(f"{self._total} points to measure in {len(plans)} launches{already}", highlight=False)

    def launch_begins(self, plan: LaunchPlan, points: int) -> None:
        self._launches_left -= 1
        self._launch_began_s = time.monotonic()
        kind = "with the plugin: starting a server" if plan.plugin else "without the plugin: starting a server"
        if plan.side_by_side:
            kind = "with and without the plugin: starting two servers"
        self._console.print(f"launch {plan.index + 1} {kind} for {points} points", style="dim")

    def point_done(self, record: Record, measured_s: float) -> None:
        case = record.case
        assert isinstance(case, ServingCase)
        self._done += 1
        if case in self._todo:
            self._todo.remove(case)
        if record.launch.startup_s is not None and self._launch_began_s is not None:
            self._overhead_s.append(record.launch.startup_s)
            self._launch_began_s = None
        self._point_s.setdefault(_key(case), []).append(measured_s)
        failure = "" if record.failure is None else f": {escape(record.failure.message)}"
        self._console.print(
            f"[{self._done}/{self._total}] {describe(case)}  [{_STYLES.get(record.status, 'red')}]{record.status}[/]",
            f"{measured_s:.1f} s{failure}{self._time_left()}",
            highlight=False,
            markup=True,
            soft_wrap=True,
        )

    def _time_left(self) -> str:
        if not self._todo:
            return ""
        average_s = mean(s for seconds in self._point_s.values() for s in seconds)
        known = {key: mean(seconds) for key, seconds in self._point_s.items()}
        left_s = sum(known.get(_key(case), average_s) for case in self._todo)
        left_s += max(0, self._launches_left) * (mean(self._overhead_s) if self._overhead_s else 0.0)
        minutes, seconds = divmod(round(left_s), 60)
        return f", about {minutes} min {seconds:02d} s left"


def describe(case: ServingCase) -> str:
    """One case in one line, as people read it."""
    plugin = "" if case.plugin else " (no plugin)"
    workload = "" if case.workload == "shared-prefix" else f" {case.workload},"
    tokens = f"prefix {case.prefix_tokens} + {case.suffix_tokens}, {case.output_tokens} out"
    return f"{case.model} {case.path}{plugin}{workload} {tokens}, {case.concurrency} in flight"


def _key(case: ServingCase) -> tuple[object, ...]:
    sizes = (case.prefix_tokens, case.suffix_tokens, case.output_tokens, case.concurrency)
    return case.workload, case.path, case.plugin, *sizes
