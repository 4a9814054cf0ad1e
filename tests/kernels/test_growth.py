"""Rows that grow by a token per step: the plan of an earlier step serves them, and the kernels read every new token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_problems import Group, Problem, Shape, bound, build
from prefixonce.attend import attend
from prefixonce.dispatch import Limits, choose
from prefixonce.growth import MOST_STEPS
from prefixonce.step import Mode

MODES = (Mode.PAGED, Mode.CASCADE, Mode.DENSE)
# A group and rows of their own; chunks of one block and of several; short rows, which are written at once.
SUFFIXES = (1, 17, 64, 300, 5)
GROUPS = (Group((0, 2, 3), ((140, True), (9, False))),)


class Growing:
    """Steps of one batch, from lengths that are `steps` tokens short of the built problem's."""

    def __init__(self, device: str, mode: Mode, steps: int, suffixes=SUFFIXES, heads=(8, 2, 64), **options) -> None:
        longest = tuple(tokens + steps for tokens in suffixes)
        self.full = build(Shape(*heads, longest, GROUPS, padding_rows=2), device)
        self.steps = steps
        self.planner = self.full.planner(max_tokens=10_000, **options)
        self.choice = choose(self.full.step, mode, Limits(dense_m_eff=0, min_rows=1))
        self.rows_id: object = object()
        self.plans = 0
        plan = self.planner.host.plan

        def counted(*arguments):
            self.plans += 1
            return plan(*arguments)

        self.planner.host.plan = counted

    def step(self, grown: int) -> Problem:
        return self.full.before(self.steps - grown, self.rows_id)

    def check(self, problem: Problem, padded_batch: int | None = None) -> None:
        padded = padded_batch or len(problem.q)
        self.planner.update(problem.step, self.choice, problem.table, problem.table_rows, padded_batch=padded)
        out, lse = problem.run(self.planner)
        error, lse_error = problem.errors((out, lse))
        assert error <= bound(problem)
        assert lse_error <= 1e-4
        assert not out[problem.step.batch_size :].any()

    def plan_only(self, problem: Problem) -> None:
        self.planner.update(problem.step, self.choice, problem.table, problem.table_rows, padded_batch=len(problem.q))


@pytest.mark.parametrize("mode", MODES)
def test_one_plan_serves_rows_that_only_grow(device, mode):
    steps = MOST_STEPS + 4
    growing = Growing(device, mode, steps)
    looked_at = (0, 1, MOST_STEPS, MOST_STEPS + 1, MOST_STEPS + 2)
    for grown in range(steps):
        if device == "cuda" or grown in looked_at:  # the interpreter is slow
            growing.check(growing.step(grown))
        else:
            growing.plan_only(growing.step(grown))
    assert growing.plans == 2, "one plan for the first step and one after the most steps that a plan lasts"


@pytest.mark.parametrize("mode", [Mode.DENSE])
def test_grown_chunks_give_the_bits_of_the_step_planned_afresh(device, mode):
    """As long as a fresh plan would cut the same chunks, which it does where none is full."""
    suffixes = (3, 9, 40, 200, 5)
    growing, fresh = (Growing(device, mode, 3, suffixes) for _ in range(2))
    for grown in range(3):
        fresh.rows_id = object()
        results = []
        for each in (growing, fresh):
            problem = each.step(grown)
            each.plan_only(problem)
            results.append(problem.run(each.planner))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (growing.plans, fresh.plans) == (1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_graph_replays_steps_that_grow(mode):
    growing = Growing("cuda", mode, MOST_STEPS + 8, heads=(32, 8, 128))
    out = torch.full_like(growing.full.q, torch.nan)

    def run():
        attend(growing.planner, growing.full.q, growing.full.k, growing.full.v, out, scale=growing.full.scale)

    growing.plan_only(growing.step(0))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for grown in range(1, growing.steps + 1):
        problem = growing.step(grown)
        growing.plan_only(problem)
        out.fill_(torch.nan)
        graph.replay()
        error = (out[: problem.step.batch_size].double() - problem.answer.out).abs().max().item()
        assert error <= bound(problem), grown
    assert growing.plans == 2


@pytest.mark.parametrize("what", ["rows", "unknown rows", "groups", "choice", "padding", "a jump", "no growth"])
def test_anything_else_is_planned_anew(interpreted, what):
    growing = Growing("cpu", Mode.DENSE, 8)
    growing.plan_only(growing.step(0))
    growing.plan_only(growing.step(1))
    assert growing.plans == 1
    problem = growing.step(2)
    padded = None
    if what == "rows":  # two requests of one length have changed places: lengths and groups say nothing of it
        growing.rows_id = object()
        problem = growing.step(2)
    elif what == "unknown rows":
        problem = dataclasses.replace(problem, step=dataclasses.replace(problem.step, rows_id=None))
    elif what == "groups":
        alike = (*problem.step.groups,)
        problem = dataclasses.replace(problem, step=dataclasses.replace(problem.step, groups=alike))
    elif what == "choice":
        growing.choice = dataclasses.replace(growing.choice)
    elif what == "padding":
        padded = problem.step.batch_size
        problem = dataclasses.replace(problem, q=problem.q[:padded], table_rows=problem.table_rows[:padded])
    elif what == "a jump":
        problem = growing.step(3)
    elif what == "no growth":
        problem = growing.step(1)
    growing.check(problem, padded)
    assert growing.plans == 2


def test_fixed_cuts_stay_where_they_are(interpreted):
    growing = Growing("cpu", Mode.DENSE, 3, split_tokens=64)
    for grown in range(3):
        growing.check(growing.step(grown))
    assert growing.plans == 3


def test_a_row_without_a_chunk_cannot_grow(interpreted):
    growing = Growing("cpu", Mode.DENSE, 2, suffixes=(0, 5, 5, 5, 5))
    for grown in range(2):
        growing.check(growing.step(grown))
    assert growing.plans == 2


def test_a_step_that_the_plan_did_not_serve_ends_it(interpreted):
    """A step served otherwise leaves a token unread whose slot nobody packed."""
    growing = Growing("cpu", Mode.DENSE, 8)
    growing.check(growing.step(0))
    growing.check(growing.step(2))
    assert growing.plans == 2
    growing.check(growing.step(3))
    assert growing.plans == 2


def test_a_plan_that_another_has_replaced_serves_no_later_step(interpreted):
    """The other may be one that cannot grow, as a graph's capture makes it."""
    growing = Growing("cpu", Mode.DENSE, 3)
    growing.plan_only(growing.step(0))
    other = growing.step(3)
    growing.plan_only(dataclasses.replace(other, step=dataclasses.replace(other.step, rows_id=None)))
    growing.check(growing.step(1))
    assert growing.plans == 3
