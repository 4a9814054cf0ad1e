"""Placement flow: the radix events of a launch one by one, and why nodes were placed as they were."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.record import PlacementTrace, RadixEvent, Record
from prefixbench.report import cells, traces
from prefixbench.report.traces import Traced
from prefixbench.report.view import Block, Json, Note, Section, Table, Widget
from prefixbench.report.words import count, path_rank

_TITLE, _QUESTION = "Placement", "What happens when a prompt enters the cache?"
_LONGEST_TABLE = 100
_TITLES = {
    "create": "Node {node} created",
    "split": "Node {node} split",
    "evict": "Node {node} evicted",
    "flush": "Cache flushed",
}


def flow_section(records: Sequence[Record]) -> Section:
    found = traces.traced(records)
    if not found:
        return traces.absent("placement", _TITLE, _QUESTION)
    shown = traces.shown(found)
    pictures = [(one, _picture(index, one)) for index, one in enumerate(shown) if one.trace.events]
    blocks: list[Block] = [Note("missing", "These launches recorded totals, but no single events.")]
    if pictures:
        blocks = traces.picker("flow", found, pictures)
    blocks += [_reasons_table(shown), _summary_table(found)]
    return Section("placement", _TITLE, _QUESTION, _finding(shown[0].trace), tuple(blocks))


def _finding(trace: PlacementTrace) -> str:
    why = max(trace.reasons, key=lambda reason: trace.reasons[reason], default=None)
    return (
        "Placement is decided once, when the radix tree creates a node; nothing is moved afterwards. "
        f"Here {trace.contiguous:,} became contiguous and {trace.paged:,} paged"
        + (f", most often because: {why}." if why else ".")
    )


def _picture(index: int, one: Traced) -> Widget:
    dropped = one.trace.events_dropped
    rest = f" {count(dropped, 'earlier event')} were not kept; the totals count all." if dropped else ""
    return Widget(
        id=f"flow-{index}",
        name="placement",
        title="Step through the events",
        caption=f"Of {one.where}.{rest}",
        alt="What can happen to a node, from creation to eviction; the current event is marked.",
        data={"events": [_event_data(event) for event in one.trace.events]},
        table=_event_table(index, one.trace.events),
    )


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


def _event_table(index: int, events: Sequence[RadixEvent]) -> Table:
    shown = events[:_LONGEST_TABLE]
    rest = f", the first {len(shown)} of {len(events)}" if len(shown) < len(events) else ""
    return cells.table(
        f"flow-{index}-events",
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


def _reasons_table(shown: Sequence[Traced]) -> Table:
    rows = [
        [cells.text(one.label), cells.text(reason), cells.amount(nodes)]
        for one in shown
        for reason, nodes in sorted(one.trace.reasons.items(), key=lambda item: -item[1])
    ]
    caption = "Why nodes were placed as they were"
    return cells.table("placement-reasons", caption, ("path and launch", "reason", "nodes"), rows)


def _summary_table(found: Sequence[Traced]) -> Table:
    """One row per case: the totals of its last launch."""
    last = {one.record.case_hash: one for one in sorted(found, key=lambda one: one.record.launch.index)}
    rows = sorted(last.values(), key=lambda f: (f.case.prefix_tokens, f.case.concurrency, path_rank(f.case.path)))
    return cells.table(
        "placement-cases",
        "Placement by case (last launch of each)",
        ("prefix tokens", "in flight", "path", "contiguous nodes", "paged nodes"),
        [
            [
                cells.amount(one.case.prefix_tokens),
                cells.amount(one.case.concurrency),
                cells.path(one.case.path),
                cells.amount(one.trace.contiguous),
                cells.amount(one.trace.paged),
            ]
            for one in rows
        ],
    )
