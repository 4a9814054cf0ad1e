"""The outside check: blocks of our client and of SGLang's own take turns on the same server, same load, same cache."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from prefixbench import store
from prefixbench.case import OutsideCase, ServingCase, Settings, case_hash
from prefixbench.config.cases import sweep_cases
from prefixbench.config.run import RunConfig
from prefixbench.engines.base import Engine, SendPlan, Server, ServerFailedError, start_all
from prefixbench.engines.bench_serving import MODULE, Load
from prefixbench.errors import UsageError
from prefixbench.jobs import resume, sweep
from prefixbench.jobs.launch import build_workload
from prefixbench.jobs.progress import describe
from prefixbench.jobs.sweep import LaunchPlan
from prefixbench.machine import environment, lock
from prefixbench.machine.telemetry import Sampler
from prefixbench.measures.base import Task
from prefixbench.measures.serving import measure_block, subtract, warm_up
from prefixbench.record import (
    SCHEMA_VERSION,
    Failure,
    Launch,
    OutsideBlock,
    OutsideMeasurement,
    OutsidePair,
    Record,
    StepCounters,
)

_CLIENT_TIMEOUT_S = 600.0


class Client(Protocol):
    """Somebody else's client: one block against the server at `url` that loaded `model`."""

    def run(self, url: str, model: Path, load: Load, position: int, timeout_s: float) -> OutsideBlock: ...


@dataclass(frozen=True)
class Job:
    """`resolved` is the configuration as plain data; `new_client` starts the client's process, before the server so
    that both start at the same time."""

    config: RunConfig
    data_set: str
    resolved: dict[str, object]
    overrides: tuple[str, ...]
    engine: Engine
    new_client: Callable[[], AbstractContextManager[Client]]
    say: Callable[[str], None]


def run(job: Job) -> list[Record]:
    """Measures what is not recorded yet; returns the records of every case asked for, failed ones included."""
    config = job.config
    for case in sweep_cases(config):
        _check(job, case)
    job.engine.check()
    with lock.hold(job.engine.resources):
        return _OutsideRun(job).run()


def _check(job: Job, case: ServingCase) -> None:
    workload = build_workload(job.config, case)
    if any(request.arrival_s for request in workload.requests):
        raise UsageError(f"workload={case.workload} has arrival times; the outside check sends all requests at once")
    if job.data_set == "generated-shared-prefix" and case.workload != "shared-prefix":
        raise UsageError(f"--data-set generated-shared-prefix is workload=shared-prefix, not {case.workload}")


class _OutsideRun:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = job.config
        self._root = Path(job.config.runs)
        self._environment = environment.observe()
        self._plugin_source = job.engine.plugin_source()
        self._made: list[Record] = []
        self._position = 0

    def run(self) -> list[Record]:
        wanted = sweep_cases(self._config)
        reused = self._reusable(wanted)
        folder = self._root / store.SWEEPS / self._config.run_id
        store.write_plan(folder, (case_hash(self._outside(case)) for case in wanted), reused)
        done = Counter(case_hash(r.case.serving) for r in reused if isinstance(r.case, OutsideCase))
        plans = sweep.plan(wanted, self._config.launches, done, self._config.engine.side_by_side)
        self._job.say(f"{len(plans)} launches to measure, {len(reused)} points recorded already")
        for launch in plans:
            self._launch(launch, folder)
        return [*reused, *self._made]

    def _launch(self, plan: LaunchPlan, folder: Path) -> None:
        """Servers and client start together; the first failure ends the launch, what it had not reached is left for
        the next run."""
        now = datetime.now(UTC)
        launch_id = f"{now:%Y%m%dT%H%M%S}-{os.urandom(4).hex()}"
        launch = Launch(launch_id, plan.index, now.isoformat("T", "milliseconds"), None)
        self._job.say(f"launch {plan.index + 1}: starting SGLang's client and the servers of {len(plan.cases)} cases")
        logs = {on: folder / f"{launch_id}{'' if on else '-stock'}.log" for on in {case.plugin for case in plan.cases}}
        with self._job.new_client() as client:
            servers, errors = start_all(self._job.engine, self._config.seed + plan.index, logs)
            try:
                for case in (case for case in plan.cases if case.plugin in errors):
                    self._save(case, launch, (), errors[case.plugin])
                if not errors:
                    for cell in sweep.cells(plan, self._config.seed):
                        if not self._measure(servers, client, cell, launch):
                            return
            finally:
                for server in servers.values():
                    server.stop()

    def _measure(
        self, servers: Mapping[bool, Server], client: Client, cell: Sequence[ServingCase], launch: Launch
    ) -> bool:
        """Cases of the same sizes take turns, pair by pair; False when a server or the client failed."""
        measure, engine = self._config.measure, self._job.engine
        workload = build_workload(self._config, cell[0])

        def watch() -> Sampler:
            return Sampler(engine.device_indices, measure.telemetry_interval_s)

        tasks = [Task(case, workload, SendPlan(case.concurrency, measure.stream_interval), watch) for case in cell]
        pairs: dict[tuple[str, bool], list[OutsidePair]] = {_arm(case): [] for case in cell}
        running = cell[0]
        try:
            for task in tasks * measure.warmup_blocks:
                running = task.case
                warm_up(servers[running.plugin], task, measure.warmup_output_len)
            for index in range(measure.blocks):
                for task in tasks:
                    running = task.case
                    pairs[_arm(running)].append(self._pair(servers[running.plugin], client, task, index % 2 == 0))
        except ServerFailedError as error:
            self._save(running, self._started(launch, servers, running), tuple(pairs[_arm(running)]), error)
            return False
        for case in cell:
            self._save(case, self._started(launch, servers, case), tuple(pairs[_arm(case)]), None)
        return True

    def _pair(self, server: Server, client: Client, task: Task, ours_first: bool) -> OutsidePair:
        """Who goes first alternates, so that a machine that warms up or slows down favours neither."""
        self._position += 2
        if ours_first:
            ours = measure_block(server, task, self._position)
            return OutsidePair(ours, *self._outside_block(server, client, task, self._position + 1))
        theirs = self._outside_block(server, client, task, self._position)
        return OutsidePair(measure_block(server, task, self._position + 1), *theirs)

    def _outside_block(
        self, server: Server, client: Client, task: Task, position: int
    ) -> tuple[OutsideBlock, StepCounters | None]:
        case, workload = task.case, task.workload
        in_flight = task.how.in_flight or len(workload.requests)
        load = Load(self._job.data_set, workload.requests, case.prefix_tokens, in_flight, self._config.seed)
        if case.plugin:
            server.set_path(case.path)
        server.flush()
        if not load.primes_itself:
            for primer in workload.primers:
                server.prime(primer)
        before = server.counters()
        block = client.run(server.url, server.model_folder, load, position, _CLIENT_TIMEOUT_S)
        after = server.counters()
        return block, None if before is None or after is None else subtract(after, before)

    def _started(self, launch: Launch, servers: Mapping[bool, Server], case: ServingCase) -> Launch:
        server = servers[case.plugin]
        return replace(launch, startup_s=server.startup_s, server_command=server.command)

    def _save(
        self, case: ServingCase, launch: Launch, pairs: tuple[OutsidePair, ...], error: ServerFailedError | None
    ) -> None:
        outside = self._outside(case)
        digest = case_hash(outside)
        notes: Settings = {"sweep": self._config.run_id, "tag": self._config.tag}
        if case.plugin:
            notes["plugin_source"] = self._plugin_source
        record = Record(
            schema_version=SCHEMA_VERSION,
            record_id=f"{digest}/{launch.launch_id}",
            status="ok" if error is None else error.status,
            case_hash=digest,
            case=outside,
            launch=launch,
            config=self._job.resolved,
            overrides=self._job.overrides,
            environment=self._environment,
            labels=(*self._job.engine.labels, "synthetic-prompts", *(("modelled-bytes",) * case.plugin)),
            measurement=OutsideMeasurement(pairs) if pairs else None,
            failure=None if error is None else Failure("outside", str(error), error.detail),
            notes=notes,
        )
        store.save(record, self._root, {})
        self._made.append(record)
        reason = "" if error is None else f": {error}"
        self._job.say(f"{describe(case)}: {record.status}{reason}")

    def _outside(self, case: ServingCase) -> OutsideCase:
        return OutsideCase(case, MODULE, self._job.data_set)

    def _reusable(self, wanted: Sequence[ServingCase]) -> list[Record]:
        if not self._config.resume:
            return []
        hashes = [case_hash(self._outside(case)) for case in wanted]
        return resume.reusable(store.read_tree(self._root).records, hashes, self._environment, self._plugin_source)


def _arm(case: ServingCase) -> tuple[str, bool]:
    return case.path, case.plugin
