"""The pool picture and the event flow say what the trace says, and say so when there is none."""

from __future__ import annotations

from dataclasses import replace

from harness.builders import serving_record
from prefixbench.record import PlacementTrace, PoolRun, RadixEvent
from prefixbench.report.placement import flow_section, memory_section, traced
from prefixbench.report.view import Note, Section, Table, Widget
from report.synthetic import measured, placement, sweep


def widget(section: Section) -> Widget:
    return next(block for block in section.blocks if isinstance(block, Widget))


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
    record, case, _ = traced(sweep(launches=1))[0]
    assert (case.path, case.prefix_tokens, case.concurrency) == ("full", 8192, 32)
    assert record.record_id in widget(memory_section(sweep(launches=1))).caption


def test_drawn_runs_cover_the_pool_without_gap_or_overlap() -> None:
    data = widget(memory_section([measured("full", 2048, 8, 0)])).data
    at = 0
    for run in data["after"]:
        assert run["start"] == at
        at += run["length"]
    assert at == 16384
    assert data["rows"] * data["per_row"] >= data["shown_slots"]
    used = max(run["start"] + run["length"] for run in data["after"] if run["kind"] != "free")
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
    assert before == ["before", None, None, None, None, None]
    assert after == ["after", 10, 10, 80, 60, 0.25]


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
    assert table(section, "placement-reasons") == [["shorter than 64 tokens", 8], ["reaches the 64-token minimum", 1]]


def test_dropped_events_are_counted_and_unknown_kinds_shown() -> None:
    trace = replace(placement(), events=(RadixEvent(7, "merge", 3, 1, None, "why"),), events_dropped=1200)
    section = flow_section(with_trace(trace))
    assert widget(section).data["events"][0]["title"] == "merge of node 3 (1 token)"
    assert any(isinstance(block, Note) and "1,200 earlier events" in block.text for block in section.blocks)


def test_totals_without_events_are_still_shown() -> None:
    section = flow_section(with_trace(replace(placement(), events=())))
    assert any(isinstance(block, Note) and block.tone == "missing" for block in section.blocks)
    assert table(section, "placement-cases")[0][-2:] == [1, 8]
