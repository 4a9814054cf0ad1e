"""One `prefixbench kernels` job: requests -> cells -> measurements -> a record for every point, failed ones included.

Order: compile ahead in side processes, count traffic under the profiler, measure the ceilings, then cell after cell;
each cell is recorded when it is done, so a kill loses one cell at most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from prefixbench import store
from prefixbench.case import KernelCase, Settings, case_hash
from prefixbench.config.kernels import EVERYTHING, KernelsConfig, Request, requests
from prefixbench.errors import EngineError
from prefixbench.machine import environment, lock
from prefixbench.machine.clocks import clock_flags, fastest_mhz
from prefixbench.machine.telemetry import Sampler
from prefixbench.measures.kernel import flashinfer_clock, registry
from prefixbench.measures.kernel.ceilings import Ceilings, measure_ceilings
from prefixbench.measures.kernel.cell import L2, Outcome, measure_cell
from prefixbench.measures.kernel.counters import Counted, count_traffic
from prefixbench.measures.kernel.implementation import work_of
from prefixbench.measures.kernel.inputs import Shape, make_inputs, sets_for_cold_l2
from prefixbench.measures.kernel.timing import Clock, GraphClock, HostClock, TimingPlan
from prefixbench.measures.kernel.worker import Job as WorkerJob
from prefixbench.measures.kernel.worker_process import compile_ahead
from prefixbench.record import (
    SCHEMA_VERSION,
    Correctness,
    Failure,
    KernelMeasurement,
    Launch,
    Record,
    Status,
    Traffic,
)

Say = Callable[[str], None]
_COMPILE_SHARE = 0.4  # of the time budget, at most; what is not built by then is built where it is first used


@dataclass(frozen=True)
class Job:
    """`resolved` is the composed configuration as plain data, `config_yaml` as text; `folder` takes the plan."""

    config: KernelsConfig
    resolved: dict[str, object]
    config_yaml: str
    overrides: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Cell:
    """One shape and the implementations that are compared on it."""

    shape: Shape
    names: tuple[str, ...]


def run(job: Job, say: Say) -> list[Record]:
    """Measures everything asked for and saves it; a BenchError only where nothing can be measured at all."""
    device = resolve_device(job.config.device)
    cells = plan_cells(requests(job.config), device)
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    with lock.hold(["cpu" if device.type == "cpu" else f"gpu-{first_gpu}"]):
        return _KernelRun(job, device, cells, say).run()


def resolve_device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise EngineError("device=cuda: torch finds no CUDA GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def plan_cells(points: Sequence[Request], device: torch.device) -> tuple[Cell, ...]:
    """Points of the same shape form one cell, whatever grid they come from."""
    names: dict[Shape, dict[str, None]] = {}
    for point in points:
        shape = Shape(*(getattr(point, name) for name in _SHAPE_AXES))
        shape.check()
        wanted = (
            registry.serving(shape, device)
            if point.implementation == EVERYTHING
            else (registry.named(point.implementation).name,)
        )
        names.setdefault(shape, {}).update(dict.fromkeys(wanted))
    return tuple(Cell(shape, tuple(found)) for shape, found in names.items())


_SHAPE_AXES = ("prefix_len", "suffix_len", "batch", "q_heads", "kv_heads", "head_dim", "page_size", "dtype", "layout")


def case_of(name: str, shape: Shape, device: torch.device) -> KernelCase:
    return KernelCase(implementation=name, **shape._asdict(), settings={"device": device.type})


class _KernelRun:
    def __init__(self, job: Job, device: torch.device, cells: Sequence[Cell], say: Say) -> None:
        self._job, self._config, self._device, self._cells, self._say = job, job.config, device, cells, say
        self._deadline_s = time.monotonic() + job.config.budget_s
        self._environment = environment.observe()
        self._source = environment.plugin_digest()
        self._clock: Clock = GraphClock() if device.type == "cuda" else HostClock()
        launch_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(4).hex()}"
        self._launch = Launch(launch_id, 0, datetime.now(UTC).isoformat(), None)
        self._fastest_mhz = 0

    def run(self) -> list[Record]:
        self._write_plan()
        if self._device.type == "cuda":
            self._compile()
        counted = self._count()
        self._say("measuring the ceilings: device copy and square matrix product")
        ceilings = measure_ceilings(self._clock, self._device)
        records = []
        for number, cell in enumerate(self._cells, start=1):
            self._say(f"cell {number} of {len(self._cells)}: {describe(cell.shape)}")
            records += self._measure(cell, ceilings, counted)
        return records

    def _remaining_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _write_plan(self) -> None:
        self._job.folder.mkdir(parents=True, exist_ok=True)
        hashes = [case_hash(case_of(name, cell.shape, self._device)) for cell in self._cells for name in cell.names]
        (self._job.folder / store.PLAN_FILE).write_text(json.dumps({"cases": hashes, "reused": []}, indent=1) + "\n")

    def _served(self) -> list[tuple[str, Shape]]:
        """(implementation, shape) that can run here: our own first, so that a short budget counts those."""
        pairs = [(name, cell.shape) for cell in self._cells for name in cell.names]
        able = [(n, shape) for n, shape in pairs if registry.named(n).unsupported(shape, self._device) is None]
        order = list(registry.implementations())
        return sorted(able, key=lambda pair: order.index(pair[0]))

    def _compile(self) -> None:
        if not self._config.compile_ahead:
            return
        smallest: dict[tuple[object, ...], tuple[str, Shape]] = {}
        for name, shape in sorted(self._served(), key=lambda pair: pair[1].pool_bytes):
            if registry.named(name).compiles:
                built = (name, shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.layout)
                parts = (bool(shape.prefix_tokens), bool(shape.suffix_tokens))
                smallest.setdefault((*built, *parts), (name, shape))
        self._say(f"building kernels ahead: {len(smallest)} variants")
        timeout_s = _COMPILE_SHARE * self._config.budget_s
        complaints = compile_ahead(list(smallest.values()), self._config.seed, timeout_s=timeout_s)
        for name, complaint in complaints.items():
            self._say(f"  {name}: {complaint}")

    def _count(self) -> dict[tuple[str, Shape], tuple[Traffic | None, str | None]]:
        cases = tuple(self._served())
        if self._device.type != "cuda":
            counted = Counted((None,) * len(cases), ("a CPU has no such counters",) * len(cases))
        elif not self._config.counters:
            counted = Counted((None,) * len(cases), ("counters=false",) * len(cases))
        else:
            self._say(f"counting DRAM and L2 traffic of {len(cases)} cases")
            budget_s = min(self._config.counters_budget_s, self._remaining_s() / 2)
            counted = count_traffic(WorkerJob(cases, profile=True, budget_s=budget_s, seed=self._config.seed))
            for reason in dict.fromkeys(reason for reason in counted.reasons if reason):
                self._say(f"  {counted.reasons.count(reason)} not counted: {reason}")
        return dict(zip(cases, zip(counted.traffic, counted.reasons, strict=True), strict=True))

    def _measure(
        self,
        cell: Cell,
        ceilings: Ceilings,
        counted: dict[tuple[str, Shape], tuple[Traffic | None, str | None]],
    ) -> list[Record]:
        if self._remaining_s() <= 0:
            spent = Failure("budget", f"the time budget of {self._config.budget_s:.0f} s was spent before this cell")
            outcomes = {name: Outcome(failure=spent) for name in cell.names}
        else:
            outcomes = self._measure_outcomes(cell, ceilings)
        records = []
        for name, outcome in outcomes.items():
            traffic, reason = counted.get((name, cell.shape), (None, None))
            if reason is not None:
                outcome.note["not_counted"] = reason
            records.append(self._save(name, cell.shape, outcome, ceilings, traffic))
        return records

    def _measure_outcomes(self, cell: Cell, ceilings: Ceilings) -> dict[str, Outcome]:
        config = self._config
        is_cold = "cold" in config.l2 and ceilings.l2_bytes > 0
        sets = sets_for_cold_l2(cell.shape, ceilings.l2_bytes) if is_cold else 1
        is_cuda = self._device.type == "cuda"
        try:
            return measure_cell(
                make_inputs(cell.shape, sets=sets, device=self._device, seed=config.seed),
                [registry.named(name) for name in cell.names],
                clock=self._clock,
                plan=TimingPlan(config.launches_per_graph if is_cuda else 1, config.warmup, config.repetitions),
                l2=_l2_states(config.l2, is_cold),
                watch=lambda: Sampler([0] if is_cuda else None, config.telemetry_interval_s),
                second_clock=flashinfer_clock.median_us if is_cuda and flashinfer_clock.is_available() else None,
            )
        except RuntimeError as error:  # the inputs or the oracle do not fit, or the device is gone
            kind = "oom" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
            failure = Failure(kind, str(error).strip().splitlines()[0], str(error))
            return {name: Outcome(failure=failure) for name in cell.names}

    def _save(self, name: str, shape: Shape, outcome: Outcome, ceilings: Ceilings, traffic: Traffic | None) -> Record:
        case = case_of(name, shape, self._device)
        failure = outcome.failure
        if failure is None and outcome.correctness is not None and not outcome.correctness.passed:
            failure = Failure("wrong-result", f"{name}: {_errors(outcome.correctness)}")
        labels = [] if traffic else ["modelled-bytes"]
        if self._device.type == "cpu":
            labels.append("cpu")
        record = Record(
            schema_version=SCHEMA_VERSION,
            record_id=f"{case_hash(case)}/{self._launch.launch_id}",
            status=status_of(failure),
            case_hash=case_hash(case),
            case=case,
            launch=self._launch,
            config=self._job.resolved,
            overrides=self._job.overrides,
            environment=self._environment,
            labels=tuple(labels),
            measurement=_measurement(name, shape, outcome, ceilings, traffic) if outcome.timings else None,
            failure=failure,
            notes={**self._notes(outcome), "plugin_source": self._source},
        )
        files = {"config.yaml": self._job.config_yaml, "overrides.txt": "\n".join(self._job.overrides) + "\n"}
        store.save(record, Path(self._config.runs), files)
        return record

    def _notes(self, outcome: Outcome) -> Settings:
        self._fastest_mhz = max(self._fastest_mhz, fastest_mhz(outcome.telemetry))
        flags = clock_flags(outcome.telemetry, self._fastest_mhz)
        notes: Settings = {"sweep": self._config.run_id, "tag": self._config.tag, **outcome.note}
        if flags:
            notes["flags"] = "; ".join(flags)
        return notes


def describe(shape: Shape) -> str:
    heads = f"{shape.q_heads}/{shape.kv_heads} heads of {shape.head_dim}"
    size = f"prefix {shape.prefix_tokens} x batch {shape.batch} + suffix {shape.suffix_tokens}"
    return f"{size}, {heads}, {shape.dtype}, page {shape.page_size}, {shape.layout}"


def _l2_states(asked: Sequence[str], is_cold_possible: bool) -> tuple[L2, ...]:
    """A device whose cache size is unknown is timed warm, whatever was asked."""
    states: tuple[L2, ...] = ("warm", "cold")
    return tuple(state for state in states if state in asked and (is_cold_possible or state == "warm")) or ("warm",)


def status_of(failure: Failure | None) -> Status:
    if failure is None:
        return "ok"
    return "oom" if failure.kind == "oom" else "timeout" if failure.kind == "budget" else "failed"


def _measurement(
    name: str, shape: Shape, outcome: Outcome, ceilings: Ceilings, counted: Traffic | None
) -> KernelMeasurement:
    work = work_of(shape, registry.named(name).path)
    half = work.qo_bytes // 2  # the query is read, the output written; partials go both ways
    read, written = work.kv_bytes + half + work.partial_bytes // 2, half + work.partial_bytes // 2
    modelled = Traffic("model", read, written, None)
    path = outcome.note.get("path_ran")
    return KernelMeasurement(
        timings=tuple(outcome.timings),
        flops=work.flops,
        model_bytes=work.total_bytes,
        traffic=(modelled, counted) if counted else (modelled,),
        correctness=outcome.correctness,
        copy_bandwidth_bytes_per_s=ceilings.copy_bytes_per_s,
        matmul_flops_per_s=ceilings.matmul_flops_per_s,
        telemetry=outcome.telemetry,
        path_ran=path if isinstance(path, str) else None,
    )


def _errors(found: Correctness) -> str:
    said = f"largest error {_figure(found.max_abs_error)} against the oracle, bound {found.bound:.3g}"
    if found.lse_bound is None:
        return said
    said = f"{said}; of the LSE {_figure(found.lse_error)}, bound {found.lse_bound:.3g}"
    is_right = found.max_abs_error is not None and found.max_abs_error <= found.bound
    return f"{said}: the output is right, its LSE is not" if is_right else said


def _figure(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.3g}"
