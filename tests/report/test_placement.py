"""The pool picture and the event flow say what the trace says, and say so when there is none."""

from __future__ import annotations

from dataclasses import replace

from harness.builders import serving_record
from prefixbench.record import PlacementTrace, PoolRun, RadixEvent
from prefixbench.report.sections.placement import flow_section
from prefixbench.report.sections.pool import KINDS, memory_section
from prefixbench.report.traces import shown, traced
from prefixbench.report.view import Note, Section, Switch, Table, Widget
from report.synthetic import measured, placement, sweep


def widget(section: Section) -> Widget:
    """The picture that is seen first."""
    first = section.blocks[0]
    found = first.options[0][1] if isinstance(first, Switch) else first
    assert isinstance(found, Widget)
    return found


def table(section: Section, name: str) -> list[list[object]]:
    found = next(block for block in section.blocks if isinstance(block, Table) and block.id == name)
    return [[cell.value for cell in row] for row in found.rows]


def with_trace(trace: PlacementTrace):
    return [serving_record("full", placement=trace)]


def test_a_selection_without_traces_says_so() -> None:
    for section in (memory_section([serving_record()]), flow_section([serving_record()])):
        (note,) = section.blocks
        assert isinstance(note, Note)
        assert note.tone == "missing"
        assert "no record of this selection carries a placement trace" in note.text


def test_the_full_path_with_the_longest_prefix_is_shown() -> None:
    first = traced(sweep(launches=1))[0]
    assert (first.case.path, first.case.prefix_tokens, first.case.concurrency) == ("full", 8192, 32)
    assert first.record.record_id in widget(memory_section(sweep(launches=1))).caption


def test_every_case_can_be_picked_before_a_second_launch_of_any_and_both_lists_agree() -> None:
    records = sweep(prefixes=(2048,), concurrencies=(8,), launches=3, paths=("cascade", "full"))
    picked = shown(traced(records))
    assert [(one.case.path, one.record.launch.index) for one in picked[:3]] == [
        ("full", 0),
        ("cascade", 0),
        ("full", 1),
    ]
    memory, flow = (section(records).blocks[0] for section in (memory_section, flow_section))
    assert isinstance(memory, Switch)
    assert isinstance(flow, Switch)
    assert memory.group == flow.group
    assert [label for label, _ in memory.options] == [label for label, _ in flow.options] == [p.label for p in picked]
    assert len({picture.table.id for _, picture in (*memory.options, *flow.options)}) == 12


def test_a_long_list_of_launches_is_cut_and_says_so() -> None:
    section = memory_section(sweep(launches=1))
    assert isinstance(section.blocks[0], Switch)
    assert len(section.blocks[0].options) == 8
    assert any(isinstance(b, Note) and b.text.startswith("8 of 32 launches") for b in section.blocks)


def test_drawn_runs_cover_the_pool_without_gap_or_overlap() -> None:
    data = widget(memory_section([measured("full", 2048, 8, 0)])).data
    at = 0
    for start, length, *_ in data["after"]:
        assert start == at
        at += length
    assert at == 16384
    assert data["rows"] * data["per_row"] >= data["shown_slots"]
    used = max(start + length for start, length, kind, *_ in data["after"] if KINDS[kind] != "free")
    assert used < data["shown_slots"] < 16384, "the untouched rest is said, not drawn"
    assert f"slots 0 to {data['shown_slots'] - 1:,} of 16,384" in data["scale"]


def test_fragmentation_is_the_free_share_outside_the_longest_run() -> None:
    runs = (
        PoolRun(0, 60, "free"),
        PoolRun(60, 10, "prefix-run", 1, 2),
        PoolRun(70, 20, "free"),
        PoolRun(90, 10, "pages", 2, 1),
    )
    trace = replace(placement(), pool_slots=100, pool_before=(), pool_after=runs)
    before, after = table(memory_section(with_trace(trace)), "pool-totals")
    assert before[1:] == ["before", None, None, None, None, None]
    assert after[1:] == ["after", 10, 10, 80, 60, 0.25]


def test_a_full_pool_has_no_fragmentation_figure() -> None:
    trace = replace(placement(), pool_slots=10, pool_before=(), pool_after=(PoolRun(0, 10, "pages"),))
    assert table(memory_section(with_trace(trace)), "pool-totals")[1][-3:] == [0, 0, None]


def test_a_huge_pool_is_cut_and_says_where() -> None:
    runs = tuple(PoolRun(2 * i, 1, "pages" if i % 2 else "free", None, None) for i in range(5000))
    trace = replace(placement(), pool_slots=10_000, pool_before=(), pool_after=runs)
    data = widget(memory_section(with_trace(trace))).data
    assert len(data["after"]) == 3000
    assert data["shown_slots"] == 6000
    assert "slots 0 to 5,999 of 10,000" in data["scale"]


def test_events_keep_order_wording_and_reason() -> None:
    section = flow_section([measured("full", 2048, 8, 0)])
    events = widget(section).data["events"]
    assert [event["title"] for event in events[:2]] == [
        "Node 1 created (2,048 tokens)",
        "Node 1 placed: contiguous (2,048 tokens)",
    ]
    assert events[3]["detail"] == "shorter than 64 tokens"
    assert "shorter than 64 tokens" in section.finding
    reasons = [row[1:] for row in table(section, "placement-reasons")]
    assert reasons == [["shorter than 64 tokens", 8], ["reaches the 64-token minimum", 1]]


def test_dropped_events_are_counted_and_unknown_kinds_shown() -> None:
    trace = replace(placement(), events=(RadixEvent(7, "merge", 3, 1, None, "why"),), events_dropped=1200)
    section = flow_section(with_trace(trace))
    assert widget(section).data["events"][0]["title"] == "merge of node 3 (1 token)"
    assert "1,200 earlier events were not kept" in widget(section).caption


def test_totals_without_events_are_still_shown() -> None:
    section = flow_section(with_trace(replace(placement(), events=())))
    assert any(isinstance(block, Note) and block.tone == "missing" for block in section.blocks)
    assert table(section, "placement-cases")[0][-2:] == [1, 8]
