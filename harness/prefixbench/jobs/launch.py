"""One launch: servers start, then cell after cell with the paths taking turns; an outcome for every case."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from prefixbench.case import ServingCase, Settings, case_hash
from prefixbench.config.cases import workload_settings
from prefixbench.config.run import RunConfig
from prefixbench.engines.base import Engine, SendPlan, Server, ServerFailedError, start_all
from prefixbench.jobs import sweep
from prefixbench.jobs.sweep import LaunchPlan
from prefixbench.machine.telemetry import Sampler
from prefixbench.measures.base import Task
from prefixbench.measures.serving import measure_block, warm_up
from prefixbench.record import Block, Failure, Launch, PlacementTrace, ServingMeasurement, Status
from prefixbench.workloads import Workload, build

Cell = tuple[ServingCase, ...]


@dataclass(frozen=True)
class Outcome:
    """What one case gave in one launch; becomes a record."""

    case: ServingCase
    launch: Launch
    status: Status
    measurement: ServingMeasurement | None
    failure: Failure | None
    notes: Settings
    server_log: str
    measured_s: float


def build_workload(config: RunConfig, case: ServingCase) -> Workload:
    """The prompts of a case; the same for every path, block and launch, so that figures can be paired."""
    return build(
        case.workload,
        workload_settings(case),
        prefix_tokens=case.prefix_tokens,
        suffix_tokens=case.suffix_tokens,
        output_tokens=case.output_tokens,
        concurrency=case.concurrency,
        vocab_size=config.model.vocab,
        seed=config.seed,
    )


def run_launch(
    config: RunConfig,
    engine: Engine,
    plan: LaunchPlan,
    cells: Sequence[Cell],
    logs: Path,
    emit: Callable[[Outcome], None],
) -> None:
    """Measures `cells` on one server, or on two where some need the plugin and some must not have it. `emit` is called
    once for each case that came to an end, good or bad; when a server fails, the cases that were not reached get no
    outcome and may be tried in another launch."""
    now = datetime.now(UTC)
    launch = Launch(f"{now:%Y%m%dT%H%M%S}-{os.urandom(4).hex()}", plan.index, now.isoformat("T", "milliseconds"), None)
    cases = [case for cell in cells for case in cell]
    logs_of = {
        plugin: logs / f"{launch.launch_id}{'' if plugin else '-stock'}.log"
        for plugin in dict.fromkeys(case.plugin for case in cases)
    }
    servers, errors = start_all(engine, config.seed + plan.index, logs_of)
    try:
        for case in (case for case in cases if case.plugin in errors):
            error, log = errors[case.plugin], logs_of[case.plugin]
            text = log.read_text(errors="replace") if log.exists() else ""
            emit(Outcome(case, launch, error.status, None, _failure("start", error), {}, text, 0.0))
        if errors:
            return
        running = {
            plugin: _Running(server, replace(launch, startup_s=server.startup_s, server_command=server.command))
            for plugin, server in servers.items()
        }
        measuring = _Launched(config, engine, running, emit)
        for cell in cells:
            if not measuring.measure(cell):
                return
    finally:
        for server in servers.values():
            server.stop()


class _Running(NamedTuple):
    server: Server
    launch: Launch


@dataclass
class _Measured:
    """One case while its cell is being measured."""

    task: Task
    warmup_blocks: int = 0
    blocks: list[Block] = field(default_factory=list)
    placement: PlacementTrace | None = None
    seconds: float = 0.0


class _Launched:
    """The servers that run (by whether they have the plugin), and the order of what was done with them."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        running: Mapping[bool, _Running],
        emit: Callable[[Outcome], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._running = running
        self._emit = emit
        self._warmed: set[object] = set()
        self._position = 0

    def measure(self, cell: Cell) -> bool:
        """Measures one cell and emits its cases; False when the server failed."""
        blocks = self._config.measure.blocks
        workload = build_workload(self._config, cell[0])
        measured = {case_hash(case): _Measured(self._task(case, workload)) for case in cell}
        rounds = sweep.turns(cell, self._running[cell[0].plugin].launch.index, blocks)
        running = cell[0]
        try:
            for case in (case for turn in rounds for case in turn):
                running = case
                self._measure_once(measured[case_hash(case)])
        except ServerFailedError as error:
            for case in cell:
                if len(measured[case_hash(case)].blocks) == blocks:
                    self._emit(self._outcome(measured[case_hash(case)]))
            self._emit(self._outcome(measured[case_hash(running)], error))
            return False
        for state in measured.values():
            self._emit(self._outcome(state))
        return True

    def _measure_once(self, state: _Measured) -> None:
        start_s = time.perf_counter()
        case = state.task.case
        server = self._running[case.plugin].server
        scope = self._config.measure.warmup_scope
        warmed = (case.path, case.plugin) if scope == "launch" else case_hash(case)
        if warmed not in self._warmed:
            for _ in range(self._config.measure.warmup_blocks):
                warm_up(server, state.task, self._config.measure.warmup_output_len)
                state.warmup_blocks += 1
            self._warmed.add(warmed)
        watched = self._config.measure.watch == "always" or sweep.has_telemetry(
            len(state.blocks), self._running[case.plugin].launch.index
        )
        state.blocks.append(measure_block(server, state.task, self._position, watched=watched))
        state.placement = server.placement()
        state.seconds += time.perf_counter() - start_s
        self._position += 1

    def _task(self, case: ServingCase, workload: Workload) -> Task:
        is_closed_loop = all(request.arrival_s == 0 for request in workload.requests)
        how = SendPlan(case.concurrency if is_closed_loop else None, self._config.measure.stream_interval)
        interval_s = self._config.measure.telemetry_interval_s
        return Task(case, workload, how, lambda: Sampler(self._engine.device_indices, interval_s))

    def _outcome(self, state: _Measured, error: ServerFailedError | None = None) -> Outcome:
        case = state.task.case
        running = self._running[case.plugin]
        threshold = self._config.engine.dense_m_eff if case.plugin else None
        status, failure = verdict(state.blocks)
        if error is not None:
            status, failure = error.status, _failure("server", error)
        return Outcome(
            case=case,
            launch=running.launch,
            status=status,
            measurement=ServingMeasurement(tuple(state.blocks), state.warmup_blocks, state.placement, threshold),
            failure=failure,
            notes={f"workload.{name}": value for name, value in state.task.workload.note.items()},
            server_log=running.server.log_tail(),
            measured_s=state.seconds,
        )


def verdict(blocks: Sequence[Block]) -> tuple[Status, Failure | None]:
    """What the blocks of a case amount to. Failed requests stay in their block, where analysis leaves them out."""
    samples = [sample for block in blocks for sample in block.requests]
    failed = [sample for sample in samples if sample.error is not None]
    if failed:
        status: Status = "failed" if len(failed) == len(samples) else "partial"
        return status, Failure("request", f"{len(failed)} of {len(samples)} requests failed", failed[0].error)
    if blocks and all("cold-cache" in block.flags for block in blocks):
        return "failed", Failure("cold-cache", "no block found the shared prefix in the cache", blocks[0].cache_state)
    return "ok", None


def _failure(kind: str, error: ServerFailedError) -> Failure:
    return Failure(kind, str(error), error.detail)
