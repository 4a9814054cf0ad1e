"""One cell: every implementation of one shape on the same inputs, checked against the oracle, then timed in turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from prefixbench.case import Settings
from prefixbench.measures.kernel.implementation import Implementation, Prepared
from prefixbench.measures.kernel.inputs import Inputs
from prefixbench.measures.kernel.oracle import judge, oracle
from prefixbench.measures.kernel.timing import Clock, Replay, Run, TimingPlan, launch_order, time_in_turns
from prefixbench.record import Correctness, Failure, KernelTiming, Telemetry

L2 = Literal["warm", "cold"]
SecondClock = Callable[[Run, TimingPlan], float]
"""Microseconds of one launch on a warm L2, by somebody else's timing."""


class Watch(Protocol):
    """Telemetry beside the timed part."""

    def telemetry(self) -> tuple[Telemetry, ...]: ...


@dataclass
class Outcome:
    """What became of one implementation; filled in stage by stage, so a late failure keeps what came before it."""

    timings: list[KernelTiming] = field(default_factory=list)
    correctness: Correctness | None = None
    telemetry: tuple[Telemetry, ...] = ()
    note: Settings = field(default_factory=dict)
    failure: Failure | None = None


def measure_cell(
    inputs: Inputs,
    implementations: Sequence[Implementation],
    *,
    clock: Clock,
    plan: TimingPlan,
    l2: Sequence[L2],
    watch: Callable[[], AbstractContextManager[Watch]],
    second_clock: SecondClock | None = None,
) -> dict[str, Outcome]:
    """An implementation that fails, whatever it raises, is an outcome; the others go on.

    Cold timings need more than one data set in `inputs`, or one that flushes the L2 by itself. `second_clock` times one
    implementation once more, into its note.
    """
    outcomes = {found.name: Outcome() for found in implementations}
    truth = oracle(inputs)
    prepared: dict[str, Prepared] = {}
    for found in implementations:
        outcome = outcomes[found.name]
        reason = found.unsupported(inputs.shape, inputs.device)
        if reason is not None:
            outcome.failure = Failure("unsupported", f"{found.name}: {reason}")
            continue
        with _Kept(outcome):
            ready = found.prepare(inputs)
            outcome.note = dict(ready.note)
            outcome.correctness = judge(ready.result(ready.run(0)), truth, inputs.shape.keys)
            prepared[found.name] = ready
    del truth
    with watch() as watched:
        for cache in l2:
            order = launch_order(cache, len(inputs.q), plan.launches)
            replays = _record(prepared, outcomes, clock, order)
            for name, timing in _timed(clock, replays, len(order), cache, plan, outcomes).items():
                outcomes[name].timings.append(timing)
    for name in prepared:
        outcomes[name].telemetry = watched.telemetry()
    if second_clock is not None:
        _time_again(second_clock, prepared, outcomes, plan)
    _release(inputs.device)
    return outcomes


def _record(
    prepared: Mapping[str, Prepared], outcomes: Mapping[str, Outcome], clock: Clock, order: Sequence[int]
) -> dict[str, Replay]:
    replays: dict[str, Replay] = {}
    for name, ready in prepared.items():
        if outcomes[name].failure is None:
            with _Kept(outcomes[name]):
                replays[name] = clock.record(ready.run, order)
    return replays


def _timed(
    clock: Clock,
    replays: Mapping[str, Replay],
    launches: int,
    cache: L2,
    plan: TimingPlan,
    outcomes: Mapping[str, Outcome],
) -> dict[str, KernelTiming]:
    """A fault while taking turns cannot be pinned on one of them: it fails them all."""
    shared = Outcome()
    with _Kept(shared):
        return time_in_turns(clock, replays, launches, cache, plan)
    for name in replays:
        outcomes[name].failure = shared.failure
    return {}


def _time_again(
    clock: SecondClock, prepared: Mapping[str, Prepared], outcomes: Mapping[str, Outcome], plan: TimingPlan
) -> None:
    """The first implementation that was timed warm: one is enough to hold two clocks against each other. What goes
    wrong is noted and fails nothing, for the timings stand without it."""
    name = next((name for name in prepared if any(timing.l2 == "warm" for timing in outcomes[name].timings)), None)
    if name is None:
        return
    attempt = Outcome()
    with _Kept(attempt):
        us = clock(prepared[name].run, plan)
        if not math.isfinite(us):
            raise ValueError(f"it gave {us} us")
        outcomes[name].note["flashinfer_clock_us"] = us
    if attempt.failure is not None:
        outcomes[name].note["flashinfer_clock_failed"] = attempt.failure.message


class _Kept(AbstractContextManager["_Kept"]):
    """Turns whatever is raised inside into the outcome's failure: peers raise anything."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        name = "oom" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        first_line = str(error).strip().splitlines()[:1]
        self._outcome.failure = Failure(name, first_line[0] if first_line else name, str(error))
        return True


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
