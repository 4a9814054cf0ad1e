"""One job: the launches that its cases still need, and a record for every case and launch, failed ones included.

A case that failed is not tried again in the same run (the next run tries it); the sweep goes on without it. When a
server dies, the cases it had not reached continue on a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixbench import store
from prefixbench.case import ServingCase, case_hash
from prefixbench.config.run import RunConfig
from prefixbench.engines import create
from prefixbench.engines.base import Engine
from prefixbench.jobs import resume, sweep
from prefixbench.jobs.launch import Outcome, run_launch
from prefixbench.jobs.progress import Progress
from prefixbench.jobs.sweep import LaunchPlan
from prefixbench.machine import environment, lock
from prefixbench.record import SCHEMA_VERSION, Record


@dataclass(frozen=True)
class Job:
    """One server group of a sweep, and what of its cases to measure. `resolved` is the composed configuration as plain
    data, `config_yaml` as text; `folder` takes the plan and the servers' logs."""

    config: RunConfig
    cases: tuple[ServingCase, ...]
    resolved: dict[str, object]
    config_yaml: str
    overrides: tuple[str, ...]
    folder: Path


def run(job: Job, progress: Progress) -> None:
    """Measures what is missing. Failures are records; only what makes every point impossible raises a BenchError."""
    engine = create(job.config)
    engine.check()
    with lock.hold(engine.resources):
        _JobRun(job, engine, progress).run()


class _JobRun:
    def __init__(self, job: Job, engine: Engine, progress: Progress) -> None:
        self._job = job
        self._config = job.config
        self._engine = engine
        self._progress = progress
        self._root = Path(job.config.runs)
        self._environment = environment.observe()
        self._plugin_source = engine.plugin_source()
        self._failed: set[str] = set()

    def run(self) -> None:
        store.clear_leftovers(self._root)
        wanted = self._job.cases
        reused = self._reusable(wanted)
        self._write_plan(wanted, reused)
        done = Counter(record.case_hash for record in reused)
        plans = sweep.plan(wanted, self._config.launches, done, self._config.engine.side_by_side)
        self._progress.begin(plans, len(reused))
        for plan in plans:
            self._run_plan(plan)

    def _run_plan(self, plan: LaunchPlan) -> None:
        settled: set[str] = set()

        def emit(outcome: Outcome) -> None:
            settled.add(case_hash(outcome.case))
            self._save(outcome)

        while True:
            out = settled | self._failed
            left = [tuple(c for c in cell if case_hash(c) not in out) for cell in sweep.cells(plan, self._config.seed)]
            cells = [cell for cell in left if cell]
            if not cells:
                return
            self._progress.launch_begins(plan, sum(map(len, cells)))
            run_launch(self._config, self._engine, plan, cells, self._job.folder, emit)

    def _save(self, outcome: Outcome) -> None:
        case, digest = outcome.case, case_hash(outcome.case)
        notes = {"sweep": self._config.run_id, "tag": self._config.tag, **outcome.notes}
        if case.plugin:
            notes["plugin_source"] = self._plugin_source
        record = Record(
            schema_version=SCHEMA_VERSION,
            record_id=f"{digest}/{outcome.launch.launch_id}",
            status=outcome.status,
            case_hash=digest,
            case=case,
            launch=outcome.launch,
            config=self._job.resolved,
            overrides=self._job.overrides,
            environment=self._environment,
            labels=self._labels(case),
            measurement=outcome.measurement,
            failure=outcome.failure,
            notes=notes,
        )
        files = {
            "config.yaml": self._job.config_yaml,
            "overrides.txt": "".join(f"{override}\n" for override in self._job.overrides),
            "server.log": outcome.server_log,
        }
        store.save(record, self._root, files)
        if outcome.status != "ok":
            self._failed.add(digest)
        self._progress.point_done(record, outcome.measured_s)

    def _labels(self, case: ServingCase) -> tuple[str, ...]:
        """What a reader must know before believing a figure."""
        is_synthetic = case.workload_settings.get("file") is None
        prompts, modelled = ("synthetic-prompts",) * is_synthetic, ("modelled-bytes",) * case.plugin
        return (*self._engine.labels, *prompts, *modelled)

    def _reusable(self, wanted: Sequence[ServingCase]) -> list[Record]:
        if not self._config.resume:
            return []
        hashes = [case_hash(case) for case in wanted]
        return resume.reusable(store.read_tree(self._root).records, hashes, self._environment, self._plugin_source)

    def _write_plan(self, wanted: Sequence[ServingCase], reused: Sequence[Record]) -> None:
        store.write_plan(self._job.folder, map(case_hash, wanted), reused)
