"""From cases to server launches that measure many of them at once.

The replicate is the server launch, and one server can measure every case that needs the same server: same model,
GPUs, engine settings and plugin. So a sweep is a list of launches; inside one, cells (the same sizes and concurrency)
follow one another in a seeded order, and within a cell the paths take turns. A cell is recorded as soon as it is done,
so a kill loses one cell at most.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixbench.case import ServingCase, case_hash


@dataclass(frozen=True)
class LaunchPlan:
    """One replicate: the cases it measures and its place in each case's series. Cases with and without the plugin need
    a server each; when they are in one plan, both servers run side by side."""

    cases: tuple[ServingCase, ...]
    index: int

    @property
    def plugin(self) -> bool:
        return any(case.plugin for case in self.cases)

    @property
    def side_by_side(self) -> bool:
        return len({case.plugin for case in self.cases}) > 1


def plan(
    wanted: Sequence[ServingCase], launches: int, done: Mapping[str, int], side_by_side: bool = False
) -> tuple[LaunchPlan, ...]:
    """The launches still needed, given how many good records each case hash has.

    Launches with and without the plugin alternate, and which goes first alternates too, so that a machine that warms
    up or slows down favours neither. With `side_by_side` they are one launch and their blocks take turns.
    """
    plans: list[LaunchPlan] = []
    for index in range(launches):
        missing = tuple(case for case in wanted if done.get(case_hash(case), 0) <= index)
        parts = [missing] if side_by_side else [tuple(c for c in missing if c.plugin is on) for on in (True, False)]
        pair = [LaunchPlan(part, index) for part in parts if part]
        plans += pair if index % 2 == 0 else pair[::-1]
    return tuple(plans)


def cells(launch: LaunchPlan, seed: int) -> tuple[tuple[ServingCase, ...], ...]:
    """The launch's cases grouped by everything but the path; the order of cells is seeded and differs by launch."""
    ordered = by_size(launch.cases)
    random.Random(f"{seed} {launch.index}").shuffle(ordered)
    return tuple(ordered)


def by_size(wanted: Sequence[ServingCase]) -> list[tuple[ServingCase, ...]]:
    """Cases that differ in path or plugin only, together; they are sent the same prompts."""
    grouped: dict[tuple[object, ...], list[ServingCase]] = {}
    for case in wanted:
        prompts = (case.workload, *sorted(case.workload_settings.items()))
        sizes = (case.prefix_tokens, case.suffix_tokens, case.output_tokens, case.concurrency)
        grouped.setdefault((*prompts, *sizes), []).append(case)
    return [tuple(group) for group in grouped.values()]


def turns(cell: Sequence[ServingCase], launch_index: int, blocks: int) -> tuple[tuple[ServingCase, ...], ...]:
    """Rounds of a cell. Each round starts one path later than the one before (counted over launches), and every
    second cycle runs backwards: over launches each path takes each place and follows each other path."""
    rounds = []
    for block in range(blocks):
        step = launch_index * blocks + block
        start = step % len(cell)
        order = [*cell[start:], *cell[:start]]
        rounds.append(tuple(order[::-1] if (step // len(cell)) % 2 else order))
    return tuple(rounds)


def has_telemetry(block: int, launch_index: int) -> bool:
    """Which blocks of a case are watched where half of them are: yes no no yes, the next launch no yes yes no. Of every
    two neighbours one is watched, and over `WATCH_CYCLE` blocks a steady drift falls on both kinds alike."""
    return (block % 2 + block // 2 + launch_index) % 2 == 0
