"""Memory layout and placement flow: the pool and the radix events of one launch, as recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixbench.case import ServingCase
from prefixbench.record import PlacementTrace, PoolRun, RadixEvent, Record, ServingMeasurement
from prefixbench.report import cells
from prefixbench.report.view import Json, Note, Section, Table, Widget
from prefixbench.report.words import count, number, path_rank, percent

_MOST_RUNS = 3000
_MOST_ROWS = 18
_CELLS_PER_ROW = 64
_SHOWN_FIRST = ("full", "auto", "dense", "cascade", "paged", "stock")
_LONGEST_TABLE = 200


def traced(records: Sequence[Record]) -> list[tuple[Record, ServingCase, PlacementTrace]]:
    """Launches whose layout was recorded; the one to show (contiguous layout, longest prefix, most users) first."""
    found = [
        (record, record.case, record.measurement.placement)
        for record in records
        if isinstance(record.case, ServingCase)
        and isinstance(record.measurement, ServingMeasurement)
        and record.measurement.placement is not None
    ]
    return sorted(
        found,
        key=lambda f: (
            f[2].contiguous == 0,
            not f[2].pool_after,
            -f[1].prefix_tokens,
            -f[1].concurrency,
            _SHOWN_FIRST.index(f[1].path) if f[1].path in _SHOWN_FIRST else len(_SHOWN_FIRST),
            f[0].record_id,
        ),
    )


def _where(record: Record, case: ServingCase) -> str:
    return (
        f"path {case.path}, prefix {case.prefix_tokens:,} tokens, {case.concurrency} requests in flight "
        f"(record {record.record_id})"
    )


def memory_section(records: Sequence[Record]) -> Section:
    title, question = "Memory layout", "Where in the pool do the shared prompts lie?"
    found = traced(records)
    if not found:
        return _absent("memory", title, question)
    record, case, trace = found[0]
    after = _fragmentation(trace.pool_after)
    prefix_tokens = sum(run.length for run in trace.pool_after if run.kind == "prefix-run")
    finding = (
        f"{count(trace.contiguous, 'node')} got one contiguous run and {trace.paged:,} stayed in pages; at the end "
        f"{prefix_tokens:,} of {trace.pool_slots:,} slots held contiguous prefix."
        if trace.pool_after
        else f"{count(trace.contiguous, 'node')} got one contiguous run and {trace.paged:,} stayed in pages."
    )
    picture = Widget(
        id="pool",
        name="pool",
        title="The pool, before and after",
        caption=f"Of {_where(record, case)}.",
        alt=f"Map of the key-value pool. {finding}",
        data=_pool_data(trace),
        table=_pool_table(trace),
    )
    rows = [
        [
            cells.text(when),
            cells.amount(sum(run.length for run in runs if run.kind == "prefix-run") if runs else None, none),
            cells.amount(sum(run.length for run in runs if run.kind == "pages") if runs else None, none),
            cells.amount(fragmentation[0] if fragmentation else None, none),
            cells.amount(fragmentation[1] if fragmentation else None, none),
            cells.amount(fragmentation[2] if fragmentation else None, none, percent),
        ]
        for when, runs, fragmentation, none in (
            ("before", trace.pool_before, _fragmentation(trace.pool_before), "no picture of the pool was taken"),
            ("after", trace.pool_after, after, "no picture of the pool was taken"),
        )
    ]
    caption = "Slots by state, and fragmentation of the free slots (the share that the longest free run does not cover)"
    columns = ("when", "contiguous prefix", "pages", "free", "longest free run", "fragmentation")
    return Section("memory", title, question, finding, (picture, cells.table("pool-totals", caption, columns, rows)))


def flow_section(records: Sequence[Record]) -> Section:
    title, question = "Placement", "What happens when a prompt enters the cache?"
    found = traced(records)
    if not found:
        return _absent("placement", title, question)
    record, case, trace = next((f for f in found if f[2].events), found[0])
    why = max(trace.reasons, key=lambda reason: trace.reasons[reason], default=None)
    finding = (
        "Placement is decided once, when the radix tree creates a node; nothing is moved afterwards. "
        f"Here {trace.contiguous:,} became contiguous and {trace.paged:,} paged"
        + (f", most often because: {why}." if why else ".")
    )
    blocks: list[Widget | Note | Table] = []
    if trace.events:
        blocks.append(
            Widget(
                id="flow",
                name="placement",
                title="Step through the events",
                caption=f"Of {_where(record, case)}.",
                alt="What can happen to a node, from creation to eviction; the current event is marked.",
                data={"events": [_event_data(event) for event in trace.events]},
                table=_event_table(trace.events),
            )
        )
    else:
        blocks.append(Note("missing", "This launch recorded totals, but no single events."))
    if trace.events_dropped:
        blocks.append(Note("info", f"{count(trace.events_dropped, 'earlier event')} were not kept; totals count all."))
    blocks.append(_reasons_table(trace))
    blocks.append(_summary_table(found))
    return Section("placement", title, question, finding, tuple(blocks))


def _absent(name: str, title: str, question: str) -> Section:
    reason = "no record of this selection carries a placement trace (launches without the plugin have none)"
    return Section(name, title, question, "Nothing was recorded about placement.", (Note("missing", f"{reason}."),))


def _fragmentation(runs: Sequence[PoolRun]) -> tuple[int, int, float | None] | None:
    """Free slots, the longest free run, and the share of the free slots outside it (None when nothing is free)."""
    if not runs:
        return None
    free = [run.length for run in runs if run.kind == "free"]
    total, longest = sum(free), max(free, default=0)
    return total, longest, 1 - longest / total if total else None


def _pool_data(trace: PlacementTrace) -> dict[str, Json]:
    """The part of the pool that was ever in use, cut into rows; the untouched rest is said, not drawn."""
    used = max(
        (
            run.start_slot + run.length
            for runs in (trace.pool_before, trace.pool_after)
            for run in runs
            if run.kind != "free"
        ),
        default=trace.pool_slots,
    )
    shown = min(trace.pool_slots, math.ceil(used * 1.1))
    for runs in (trace.pool_before, trace.pool_after):
        if len(runs) > _MOST_RUNS:
            shown = min(shown, runs[_MOST_RUNS].start_slot)
    per_cell = max(1, math.ceil(shown / (_MOST_ROWS * _CELLS_PER_ROW)))
    per_row = per_cell * _CELLS_PER_ROW
    scale = f"A cell is {count(per_cell, 'slot')}; one slot holds one token's keys and values of all layers."
    if shown < trace.pool_slots:
        scale += f" Drawn: slots 0 to {shown - 1:,} of {trace.pool_slots:,}."
    return {
        "shown_slots": shown,
        "per_row": per_row,
        "cells_per_row": _CELLS_PER_ROW,
        "rows": math.ceil(shown / per_row),
        "scale": scale,
        "before": [_run_data(run) for run in trace.pool_before if run.start_slot < shown],
        "after": [_run_data(run) for run in trace.pool_after if run.start_slot < shown],
    }


def _run_data(run: PoolRun) -> dict[str, Json]:
    return {"start": run.start_slot, "length": run.length, "kind": run.kind, "node": run.node_id, "users": run.users}


def _pool_table(trace: PlacementTrace) -> Table:
    shown = trace.pool_after[:_LONGEST_TABLE]
    rest = f", the first {len(shown)} of {len(trace.pool_after):,}" if len(shown) < len(trace.pool_after) else ""
    unknown_node, unknown_users = "free slots belong to no node, and pages are not always kept by node", "not counted"
    return cells.table(
        "pool-runs",
        f"Runs of the pool after the last block{rest}",
        ("state", "first slot", "tokens", "node", "users"),
        [
            [
                cells.text(run.kind),
                cells.amount(run.start_slot, say=lambda value: f"{value:,.0f}"),
                cells.amount(run.length, say=lambda value: f"{value:,.0f}"),
                cells.amount(run.node_id, unknown_node, say=lambda value: f"{value:.0f}"),
                cells.amount(run.users, unknown_users),
            ]
            for run in shown
        ],
    )


_TITLES = {
    "create": "Node {node} created",
    "split": "Node {node} split",
    "evict": "Node {node} evicted",
    "flush": "Cache flushed",
}


def _event_title(event: RadixEvent) -> str:
    if event.kind == "place":
        return f"Node {event.node_id} placed: {event.layout or 'layout not recorded'}"
    return _TITLES.get(event.kind, f"{event.kind} of node {event.node_id}").format(node=event.node_id)


def _event_data(event: RadixEvent) -> dict[str, Json]:
    return {
        "kind": event.kind,
        "node": event.node_id,
        "tokens": event.tokens,
        "layout": event.layout,
        "title": f"{_event_title(event)} ({count(event.tokens, 'token')})",
        "detail": event.detail,
    }


def _event_table(events: Sequence[RadixEvent]) -> Table:
    shown = events[:_LONGEST_TABLE]
    rest = f", the first {len(shown)} of {len(events)}" if len(shown) < len(events) else ""
    return cells.table(
        "events",
        f"Events of the radix tree, in order{rest}",
        ("event", "what", "tokens", "layout", "why"),
        [
            [
                cells.amount(event.sequence, say=lambda value: f"{value:.0f}"),
                cells.text(_event_title(event)),
                cells.amount(event.tokens),
                cells.text(event.layout) if event.layout else cells.missing("only a placement has a layout"),
                cells.text(event.detail),
            ]
            for event in shown
        ],
    )


def _reasons_table(trace: PlacementTrace) -> Table:
    rows = sorted(trace.reasons.items(), key=lambda item: -item[1])
    return cells.table(
        "placement-reasons",
        "Why nodes were placed as they were",
        ("reason", "nodes"),
        [[cells.text(reason), cells.amount(nodes)] for reason, nodes in rows],
    )


def _summary_table(found: Sequence[tuple[Record, ServingCase, PlacementTrace]]) -> Table:
    """One row per case: the totals of its last launch."""
    last = {record.case_hash: (case, trace) for record, case, trace in sorted(found, key=lambda f: f[0].launch.index)}
    rows = sorted(last.values(), key=lambda item: (item[0].prefix_tokens, item[0].concurrency, path_rank(item[0].path)))
    return cells.table(
        "placement-cases",
        "Placement by case (last launch of each)",
        ("prefix tokens", "in flight", "path", "contiguous nodes", "paged nodes"),
        [
            [
                cells.amount(case.prefix_tokens),
                cells.amount(case.concurrency),
                cells.path(case.path),
                cells.amount(trace.contiguous, say=number),
                cells.amount(trace.paged, say=number),
            ]
            for case, trace in rows
        ],
    )
