"""Memory layout: the KV pool of a launch before and after, as recorded, and how broken up its free slots are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixbench.record import PlacementTrace, PoolRun, Record
from prefixbench.report import cells, traces
from prefixbench.report.traces import Traced
from prefixbench.report.view import Cell, Json, Section, Table, Widget
from prefixbench.report.words import count, percent

_TITLE, _QUESTION = "Memory layout", "Where in the pool do the shared prompts lie?"
_MOST_RUNS = 3000
_MOST_ROWS = 18
_CELLS_PER_ROW = 64
_LONGEST_TABLE = 100
KINDS = ("free", "prefix-run", "pages")


def memory_section(records: Sequence[Record]) -> Section:
    found = traces.traced(records)
    if not found:
        return traces.absent("memory", _TITLE, _QUESTION)
    shown = traces.shown(found)
    pictures = [(one, _picture(index, one)) for index, one in enumerate(shown)]
    blocks = (*traces.picker("pool", found, pictures), _totals(shown))
    return Section("memory", _TITLE, _QUESTION, _finding(shown[0].trace), blocks)


def _finding(trace: PlacementTrace) -> str:
    placed = f"{count(trace.contiguous, 'node')} got one contiguous run and {trace.paged:,} stayed in pages"
    if not trace.pool_after:
        return f"{placed}."
    prefix_tokens = _slots(trace.pool_after, "prefix-run")
    return f"{placed}; at the end {prefix_tokens:,} of {trace.pool_slots:,} slots held contiguous prefix."


def _picture(index: int, one: Traced) -> Widget:
    return Widget(
        id=f"pool-{index}",
        name="pool",
        title="The pool, before and after",
        caption=f"Of {one.where}.",
        alt=f"Map of the key-value pool. {_finding(one.trace)}",
        data=_data(one.trace),
        table=_runs_table(index, one.trace),
    )


def _totals(shown: Sequence[Traced]) -> Table:
    none = "no picture of the pool was taken"
    rows: list[list[Cell]] = []
    for one in shown:
        for when, runs in (("before", one.trace.pool_before), ("after", one.trace.pool_after)):
            values = _slots_and_fragmentation(runs)
            slots = [cells.amount(value, none) for value in values[:-1]]
            rows.append([cells.text(one.label), cells.text(when), *slots, cells.amount(values[-1], none, percent)])
    caption = "Slots by state, and fragmentation of the free slots (the share that the longest free run does not cover)"
    columns = ("path and launch", "when", "contiguous prefix", "pages", "free", "longest free run", "fragmentation")
    return cells.table("pool-totals", caption, columns, rows)


def _slots_and_fragmentation(runs: Sequence[PoolRun]) -> tuple[float | None, ...]:
    """Slots of contiguous prefix, of pages, free, in the longest free run; and the free share outside that run."""
    if not runs:
        return None, None, None, None, None
    free = [run.length for run in runs if run.kind == "free"]
    total, longest = sum(free), max(free, default=0)
    fragmentation = 1 - longest / total if total else None
    return _slots(runs, "prefix-run"), _slots(runs, "pages"), total, longest, fragmentation


def _slots(runs: Sequence[PoolRun], kind: str) -> int:
    return sum(run.length for run in runs if run.kind == kind)


def _data(trace: PlacementTrace) -> dict[str, Json]:
    """The part of the pool that was ever in use, cut into rows; the untouched rest is said, not drawn.

    Runs are lists: first slot, length, index into `kinds`, node, users.
    """
    pools = (trace.pool_before, trace.pool_after)
    ends = [run.start_slot + run.length for runs in pools for run in runs if run.kind != "free"]
    shown = min(trace.pool_slots, math.ceil(max(ends, default=trace.pool_slots) * 1.1))
    for runs in pools:
        if len(runs) > _MOST_RUNS:
            shown = min(shown, runs[_MOST_RUNS].start_slot)
    per_cell = max(1, math.ceil(shown / (_MOST_ROWS * _CELLS_PER_ROW)))
    per_row = per_cell * _CELLS_PER_ROW
    scale = f"A cell is {count(per_cell, 'slot')}; one slot holds one token's keys and values of all layers."
    if shown < trace.pool_slots:
        scale += f" Drawn: slots 0 to {shown - 1:,} of {trace.pool_slots:,}."
    before, after = ([_run(run) for run in runs if run.start_slot < shown] for runs in pools)
    return {
        "shown_slots": shown,
        "per_row": per_row,
        "cells_per_row": _CELLS_PER_ROW,
        "rows": math.ceil(shown / per_row),
        "scale": scale,
        "kinds": KINDS,
        "before": before,
        "after": after,
    }


def _run(run: PoolRun) -> list[Json]:
    return [run.start_slot, run.length, KINDS.index(run.kind), run.node_id, run.users]


def _runs_table(index: int, trace: PlacementTrace) -> Table:
    shown = trace.pool_after[:_LONGEST_TABLE]
    rest = f", the first {len(shown)} of {len(trace.pool_after):,}" if len(shown) < len(trace.pool_after) else ""
    unknown_node, unknown_users = "free slots belong to no node, and pages are not always kept by node", "not counted"
    return cells.table(
        f"pool-{index}-runs",
        f"Runs of the pool after the last block{rest}",
        ("state", "first slot", "tokens", "node", "users"),
        [
            [
                cells.text(run.kind),
                cells.amount(run.start_slot),
                cells.amount(run.length),
                cells.amount(run.node_id, unknown_node, say=lambda value: f"{value:.0f}"),
                cells.amount(run.users, unknown_users),
            ]
            for run in shown
        ],
    )
