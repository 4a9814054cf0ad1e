"""One timing entry: launches inside a CUDA graph, events around each replay, implementations taking turns.

Host launch time would otherwise hide short kernels: a Python call costs up to 200 us, some of these kernels 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from prefixbench.record import KernelTiming

Run = Callable[[int], object]
Replay = Callable[[], object]


@dataclass(frozen=True)
class TimingPlan:
    """`launches` per replay, `warmup` replays before the first sample, `repetitions` samples."""

    launches: int = 10
    warmup: int = 3
    repetitions: int = 20


class Clock(Protocol):
    """How launches are recorded and timed. `time_us` returns a reading that is valid after `settle`."""

    name: str

    def record(self, run: Run, order: Sequence[int]) -> Replay: ...

    def time_us(self, replay: Replay) -> Callable[[], float]: ...

    def settle(self) -> None: ...


class GraphClock:
    """CUDA graphs timed by CUDA events on the current stream."""

    name = "CUDA events around a graph replay"

    def record(self, run: Run, order: Sequence[int]) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in sorted(set(order)):  # compile, allocate, choose algorithms: none of it may happen in capture
                run(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in order:
                run(i)
        return graph.replay

    def time_us(self, replay: Replay) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        return lambda: 1e3 * start.elapsed_time(end)

    def settle(self) -> None:
        torch.cuda.synchronize()


class HostClock:
    """Plain calls timed by the host's monotonic clock: right where calls are synchronous, that is on a CPU."""

    name = "host clock around plain calls"

    def record(self, run: Run, order: Sequence[int]) -> Replay:
        def replay() -> None:
            for i in order:
                run(i)

        return replay

    def time_us(self, replay: Replay) -> Callable[[], float]:
        start_s = time.perf_counter()
        replay()
        elapsed_us = 1e6 * (time.perf_counter() - start_s)
        return lambda: elapsed_us

    def settle(self) -> None:
        """Nothing is in flight."""


def launch_order(l2: Literal["warm", "cold"], sets: int, launches: int) -> tuple[int, ...]:
    """Data set of each launch of a replay. Cold rotates through all sets, a whole number of times, so that replay
    after replay the same set comes back only when every other one has passed; warm stays on set 0."""
    if l2 == "warm":
        return (0,) * launches
    return tuple(range(sets)) * -(-launches // sets)


def time_in_turns(
    clock: Clock, replays: Mapping[str, Replay], launches: int, l2: Literal["warm", "cold"], plan: TimingPlan
) -> dict[str, KernelTiming]:
    """Samples of all implementations, one of each per round, so that a drifting clock favours none.

    Before each sample one untimed replay brings this implementation's own data back into the L2 (or its rotation).
    """
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in replays}
    for replay in replays.values():
        for _ in range(plan.warmup):
            replay()
    for _ in range(plan.repetitions):
        for name, replay in replays.items():
            replay()
            readings[name].append(clock.time_us(replay))
    clock.settle()
    return {
        name: KernelTiming(l2, clock.name, launches, plan.warmup, tuple(read() / launches for read in reads))
        for name, reads in readings.items()
    }
