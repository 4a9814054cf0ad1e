"""Host time of one decode step before its kernels run: the decision alone, and everything that the plugin plans.

The plugin's own objects serve stand-in requests, whose paths are known without a radix tree. Time is the process's own
clock around one step; the decision of an unchanged step is shorter than that clock resolves, so it is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from time import perf_counter_ns

import torch

from prefixbench.case import DispatchCase
from prefixbench.record import DispatchMeasurement
from prefixonce.cost import Profile
from prefixonce.dealing import Geometry
from prefixonce.dispatch import Dispatcher, Limits
from prefixonce.growth import Growth
from prefixonce.hostplan import HostPlanner, Overlap
from prefixonce.limits import HeadSpec
from prefixonce.plugin.grouping import Chain, Link, RunningRows
from prefixonce.plugin.runtime import ModelShape, PlannedStep, Runtime
from prefixonce.plugin.settings import PluginSettings
from prefixonce.step import DecodeStep, Mode, Path, Segment, SlotPiece

_REPEATS = 1000  # decisions per sample when nothing changes
_TILE_ROWS = 128  # of a Hopper GPU, which a plan without a device is made for

PlanStep = Callable[[PlannedStep], object]


@dataclass(eq=False)
class _Request:
    chain: Chain
    seq_len: int


class _Batch:
    """A running batch: before every step, requests change as the case says and all rows are one token longer."""

    def __init__(self, case: DispatchCase) -> None:
        self._case = case
        self._ids = count(1)
        self._random = random.Random(0)
        prefix = case.prefix_tokens
        self._prefixes = [
            (Link(next(self._ids), prefix, Segment(1 + number * prefix, prefix)),) for number in range(case.groups)
        ]
        self._rows = [self._admit(row) for row in range(case.batch)]

    def steps(self) -> Iterator[tuple[list[_Request], torch.Tensor]]:
        """Rows and their lengths; the list is a new one only if a row changed."""
        while True:
            for request in self._rows:
                request.seq_len += 1
            yield self._rows, torch.tensor([request.seq_len for request in self._rows])
            self._left = self._rows  # kept until the next step is over: a server gives finished requests up elsewhere
            if self._case.change == "one":
                leaving = self._random.randrange(len(self._rows))
                self._rows = [*self._rows[:leaving], *self._rows[leaving + 1 :], self._admit(leaving)]
            elif self._case.change == "all":
                self._rows = [self._admit(row) for row in range(self._case.batch)]

    def _admit(self, row: int) -> _Request:
        shared: Chain = ()
        if self._prefixes:
            shared = self._prefixes[row * len(self._prefixes) // self._case.batch]
        own_tokens = self._case.suffix_tokens + (0 if shared else self._case.prefix_tokens)
        tokens = self._case.prefix_tokens + self._case.suffix_tokens
        slots = SlotPiece(torch.empty(0, dtype=torch.int64), own_tokens)
        return _Request((*shared, Link(next(self._ids), tokens, slots)), tokens)


def measure_dispatch(case: DispatchCase, *, steps: int, warmup: int, profile: Profile) -> DispatchMeasurement:
    """Times `steps` steps of the case, decisions and whole plans apart. `profile` is what `auto` asks."""
    on_device = case.settings["device"] == "cuda"
    plan_step = _device_planner(case, steps + warmup) if on_device else _host_planner(case)
    planning_us, path = _planning(case, plan_step, steps, warmup, profile)
    decision_us = _decisions(case, steps, warmup, profile)
    return DispatchMeasurement(
        decision_us=decision_us[warmup:],
        decision_repeats=_REPEATS if case.change == "none" else 1,
        planning_us=planning_us[warmup:],
        with_device_copies=on_device,
        path_chosen=path.value,
    )


def _planning(
    case: DispatchCase, plan_step: PlanStep, steps: int, warmup: int, profile: Profile
) -> tuple[tuple[float, ...], Path]:
    runtime = Runtime(PluginSettings(mode=Mode.parse(case.mode)))
    runtime.cost = profile
    runtime.shape = ModelShape(case.q_heads, case.kv_heads, case.head_dim, kv_token_bytes=1)
    runtime.rows = RunningRows(lambda request: request.chain)
    samples_us = []
    path = Path.STOCK
    for _, (rows, seq_lens) in zip(range(warmup + steps), _Batch(case).steps(), strict=False):
        if case.settings["device"] == "cuda":
            torch.cuda.synchronize()  # as in a server, the copies of the step before are over
        began_ns = perf_counter_ns()
        runtime.plan(rows, seq_lens.numpy())
        planned = runtime.take(seq_lens.numpy(), lambda _step, _sharing: True)
        assert planned is not None
        path = planned.choice.path
        if path is not Path.STOCK:
            plan_step(planned)
        samples_us.append((perf_counter_ns() - began_ns) / 1e3)
    return tuple(samples_us), path


def _decisions(case: DispatchCase, steps: int, warmup: int, profile: Profile) -> tuple[float, ...]:
    mode, cost = Mode.parse(case.mode), profile
    dispatcher, running = Dispatcher(Limits()), RunningRows[_Request](lambda request: request.chain)
    repeats = _REPEATS if case.change == "none" else 1
    samples_us = []
    for _, (rows, seq_lens) in zip(range(warmup + steps), _Batch(case).steps(), strict=False):
        groups = () if mode in (Mode.STOCK, Mode.PAGED) else running.groups_of(rows)
        step = DecodeStep(seq_lens.numpy(), case.q_heads, case.kv_heads, case.head_dim, groups)
        began_ns = perf_counter_ns()
        for _ in repeat(None, repeats):
            dispatcher.choose(step, mode, cost)
        samples_us.append((perf_counter_ns() - began_ns) / 1e3 / repeats)
    return tuple(samples_us)


def _host_planner(case: DispatchCase) -> PlanStep:
    spec = HeadSpec(case.q_heads, case.kv_heads, case.head_dim)
    gqa_group, processors = case.q_heads // case.kv_heads, int(str(case.settings["processors"]))
    geometry = Geometry(case.kv_heads, gqa_group, processors, max(_TILE_ROWS, gqa_group))
    host = HostPlanner(spec, geometry, Overlap(), max_tokens=0)
    growth = Growth()

    def plan(planned: PlannedStep) -> None:
        asked = planned.step, planned.choice, planned.step.batch_size
        if not growth.steps(*asked) and host.plan(*asked).can_grow:
            growth.begin(*asked)

    return plan


def _device_planner(case: DispatchCase, steps: int) -> PlanStep:
    from prefixonce.plugin.cuda import CudaKernels  # needs Triton's driver

    longest = case.prefix_tokens + case.suffix_tokens + steps + 1
    shape = ModelShape(case.q_heads, case.kv_heads, case.head_dim, kv_token_bytes=1)
    kernels = CudaKernels(
        shape, max_batch=case.batch, pool_slots=case.batch * longest, dtype=torch.bfloat16, device="cuda"
    )
    table = torch.zeros(case.batch, longest, dtype=torch.int32, device="cuda")
    rows = torch.arange(case.batch, device="cuda")

    def plan(planned: PlannedStep) -> None:
        assert kernels.fits(planned.step, planned.sharing)
        kernels.plan(planned.step, planned.choice, table, rows, padded_batch=case.batch)

    return plan
