"""The page as data: what is answered, refused, missing and warned about."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from harness.builders import CPU, serving_record, wrap
from harness.every_kind import dispatch, numerics
from prefixbench.analysis import attribution, frame, stats
from prefixbench.record import Failure, Record
from prefixbench.report import markdown, render
from prefixbench.report.build import Selected, build
from prefixbench.report.view import Cell, Chart, Note, Page, Table, Widget
from report.synthetic import kernels, measured, sweep


def page_of(records: list[Record], compared: list[Record] | None = None) -> Page:
    return build("r", Selected("latest", tuple(records)), Selected("old", tuple(compared)) if compared else None)


def table(page: Page, name: str) -> Table:
    return next(found for found in page.tables() if found.id == name)


def column(found: Table, label: str) -> list[Cell]:
    index = [c.label for c in found.columns].index(label)
    return [row[index] for row in found.rows]


def chart(page: Page, name: str) -> Chart:
    return next(found for found in page.charts() if found.id == name)


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(sweep(prefixes=(128, 8192), concurrencies=(8, 32)) + kernels(batches=(16, 256), groups=(1, 4)))


def test_the_headline_is_the_ratio_of_the_records_with_its_interval(page: Page) -> None:
    records = sweep(prefixes=(8192,), concurrencies=(32,))
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    expected = stats.ratio(point.sample("auto"), point.sample("stock"))
    assert page.headline.figure == f"{expected.estimate:.2f}×"
    assert f"{expected.low:.2f} to {expected.high:.2f} over 3 launches" in (page.headline.interval or "")
    assert "unmodified SGLang" in page.headline.sentence
    assert "8,192 shared tokens, 32 in flight" in page.headline.sentence


def test_the_throughput_table_holds_the_means_of_the_records(page: Page) -> None:
    records = sweep(prefixes=(8192,), concurrencies=(32,))
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    rows = [row for row in table(page, "throughput-1-data").rows if row[0].value == 8192]
    assert [row[1].text for row in rows] == ["stock", "stock+plugin", "cascade", "full", "auto"]
    for row in rows:
        values = list(point.sample(row[1].text).values())
        interval = stats.mean_interval(values)
        assert row[2].value == pytest.approx(interval.estimate)
        assert row[3].value == pytest.approx([interval.low, interval.high])
        assert row[4].value == pytest.approx(values)


def test_a_chart_draws_what_its_table_says(page: Page) -> None:
    found = chart(page, "throughput-0")
    drawn = {trace["name"]: trace for trace in found.figure["data"] if trace["mode"] == "lines+markers"}
    for row in found.table.rows:
        trace = drawn[row[1].text]
        assert trace["y"][trace["x"].index(row[0].value)] == row[2].value


def test_attribution_is_the_analysis_in_three_yardsticks(page: Page) -> None:
    records = sweep(prefixes=(8192,), concurrencies=(32,))
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    rungs = [
        attribution.Rung(arm, point.sample(arm), point.step_shares(arm)) for arm in ("stock", "cascade", "full", "auto")
    ]
    for name in attribution.YARDSTICKS:
        expected = [share.share.estimate for share in attribution.attribute(rungs, name).shares]
        shown = column(table(page, f"attribution-{name.replace(' ', '-')}-data"), "share")
        assert [cell.value for cell in shown] == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_path_that_did_not_run_gets_no_credit_and_is_a_violation(share: float) -> None:
    steps = {"cascade": round(64 * share), "stock": 64 - round(64 * share)}
    page = page_of(sweep(prefixes=(2048,), concurrencies=(32,), ran={"cascade": steps}))
    (violation,) = page.violations
    assert f"cascade active on {steps['cascade'] / 64:.0%} of steps" in violation
    assert violation in page.warnings
    shares = column(table(page, "attribution-throughput-data"), "share")
    assert shares[0].value is None
    assert "cascade active on" in (shares[0].missing or "")


def test_a_headline_path_that_did_not_run_has_no_headline_figure() -> None:
    records = sweep(prefixes=(2048,), concurrencies=(32,), paths=("stock", "cascade"), ran={"cascade": {"stock": 64}})
    page = page_of(records)
    assert page.headline.figure is None
    assert "cascade active on 0% of steps" in (page.headline.why_not or "")


def test_a_point_with_an_interval_speaks_before_a_longer_prefix_without() -> None:
    several = sweep(prefixes=(512, 2048), concurrencies=(8, 32), launches=3)
    once = sweep(prefixes=(8192,), concurrencies=(32,), launches=1)
    sentence = page_of([*several, *once]).headline.sentence
    assert "2,048 shared tokens, 32 in flight" in sentence
    assert "of those with several launches" in sentence
    assert "8,192 shared tokens, 32 in flight" in page_of(once).headline.sentence


def test_paths_that_ran_are_no_violation(page: Page) -> None:
    assert page.violations == ()


def test_one_launch_has_neither_error_bar_nor_interval() -> None:
    page = page_of(sweep(prefixes=(512, 2048), concurrencies=(8,), launches=1))
    found = chart(page, "throughput-0")
    for trace in found.figure["data"]:
        assert set(trace.get("error_y", {}).get("array", [])) <= {None}
    intervals = column(found.table, "95% interval")
    assert {cell.text for cell in intervals} == {"—"}
    assert {cell.missing for cell in intervals} == {"one launch has no error bar"}
    assert "No interval" in (page.headline.interval or "")


def test_one_output_token_has_no_decode_rate_and_says_why() -> None:
    records = [serving_record(path, output_tokens=1, ran={"stock": 0}) for path in ("stock", "cascade")]
    page = page_of(records)
    cells = column(table(page, "throughput-0-data"), "tokens/s")
    assert {(cell.text, cell.value, cell.missing) for cell in cells} == {("—", None, "no decode step")}
    json.loads(render.json(page), parse_constant=lambda c: pytest.fail(c))


def test_a_failed_point_is_a_gap_with_its_reason() -> None:
    records = sweep(prefixes=(512, 2048), concurrencies=(8,), paths=("stock", "cascade"), launches=2)
    broken = [
        replace(r, status="oom", measurement=None, failure=Failure("OutOfMemory", "the pool\nis full"))
        if r.case.path == "cascade" and r.case.prefix_tokens == 2048
        else r
        for r in records
    ]
    page = page_of(broken)
    traces = chart(page, "throughput-0").figure["data"]
    trace = next(t for t in traces if t["name"] == "cascade")
    assert trace["y"][0] is not None
    assert trace["y"][1] is None
    assert trace["connectgaps"] is False
    reasons = {cell.missing for cell in column(table(page, "throughput-0-data"), "tokens/s")}
    assert reasons == {None, "oom: the pool is full"}
    assert "2 of 12 records are not complete (2 oom); their points are gaps or smaller." in page.warnings


def test_a_control_that_was_found_out_is_no_failure() -> None:
    """A planted fault that shows ends its record as failed, as it must; the same without a fault is one."""
    measured = numerics()
    for fault, warned in (("zero-prefix", 0), ("none", 1)):
        case = replace(measured.case, fault=fault)  # type: ignore[arg-type]
        found_out = replace(measured, status="failed", case=case)
        page = page_of([serving_record("stock"), found_out])
        assert sum("not complete" in warning for warning in page.warnings) == warned


def test_a_batch_that_was_not_realized_is_never_labelled_as_asked() -> None:
    records = [
        serving_record(path, launch, concurrency=64, counter_changes={"batch_histogram": {32: 64}})
        for path in ("stock", "cascade")
        for launch in range(2)
    ]
    page = page_of(records)
    assert "32 in flight (64 asked for)" in page.headline.sentence
    assert any("64 requests were asked for, 32 ran at once" in warning for warning in page.warnings)
    assert "64 in flight" not in page.headline.sentence


def test_a_label_says_what_tells_points_apart_and_no_more() -> None:
    """Shape and length of answers follow from the model here, the workload alone tells the others apart."""
    small = {"model": "small", "model_settings": {"layers": 2}, "workload": "shared-prefix", "output_tokens": 65}
    large = {"model": "large", "model_settings": {"layers": 9}, "output_tokens": 33}
    records = [
        *sweep((512,), (8,), **small),
        *sweep((512,), (8,), **large, workload="shared-prefix"),
        *sweep((512,), (8,), **large, workload="rollouts"),
    ]
    labels = {point.text for point in column(table(page_of(records), "path-shares-data"), "point") if point.text}
    assert labels == {
        "512 shared tokens, 8 in flight, model small, workload shared-prefix",
        "512 shared tokens, 8 in flight, model large, workload shared-prefix",
        "512 shared tokens, 8 in flight, model large, workload rollouts",
    }


def test_flagged_blocks_are_left_out_and_counted() -> None:
    records = sweep(prefixes=(512,), concurrencies=(8,), paths=("stock", "cascade"), launches=2)
    throttled = measured("cascade", 512, 8, flags=("throttled: power",))
    page = page_of([*(r for r in records if r.record_id != throttled.record_id), throttled])
    assert "2 blocks of 12 left out of every figure by rule: throttled: power." in page.warnings
    found = table(page, "throughput-0-data")
    values = zip(column(found, "path"), column(found, "single launches"), strict=True)
    launches = {path.text: len(cell.value) for path, cell in values}
    assert launches == {"stock": 2, "stock+plugin": 2, "cascade": 1}


def test_flags_that_differ_in_their_figures_are_one_warning() -> None:
    flags = ("other-load: 2.8 CPUs were busy", "other-load: 1.4 CPUs were busy", "batch-below-concurrency")
    page = page_of([measured("stock", 64, 4, launch, flags=(flag,)) for launch, flag in enumerate(flags)])
    assert "4 blocks of 6: other-load (for example: 2.8 CPUs were busy)." in page.warnings
    assert "2 blocks of 6: batch-below-concurrency." in page.warnings
    assert len(page.warnings) == 2


@pytest.mark.parametrize("label", ["fake-engine", "synthetic"])
def test_what_was_not_measured_gets_no_headline(label: str) -> None:
    page = page_of(sweep(prefixes=(512,), concurrencies=(8,), launches=2, labels=(label,)))
    assert page.headline.figure is None
    assert page.headline.sentence == "These are not measurements."


def test_thousands_of_reasons_do_not_flood_the_page() -> None:
    reasons = {f"cheapest by the cost model: {i / 10} us": 1 for i in range(1000)}
    record = serving_record("auto", counter_changes={"reasons": reasons | {"nobody shares a prefix": 9}})
    found = table(page_of([record]), "reasons")
    assert len(found.rows) == 40
    assert found.caption.endswith("the commonest 40 of 1,001 reasons")
    assert found.rows[0][1].text == "nobody shares a prefix"


def test_labels_are_said_in_plain_words(page: Page) -> None:
    names = [name for name, _ in page.badges]
    assert names == ["Ran on a CPU", "Random weights", "Synthetic prompts"]
    assert page_of([measured("stock", 64, 4, labels=("new-label",))]).badges[0][0] == "new-label"


def test_every_section_is_there_even_when_nothing_was_measured() -> None:
    nothing = replace(measured("stock", 512, 8), measurement=None, status="failed", failure=Failure("Boom", "down"))
    page = page_of([nothing])
    full = page_of(sweep(prefixes=(512,), concurrencies=(8,), launches=1))
    assert [s.id for s in page.sections] == [s.id for s in full.sections]
    assert page.headline.figure is None
    notes = [block for block in page.blocks() if isinstance(block, Note) and block.tone == "missing"]
    assert len(notes) >= 6
    assert all(len(note.text) > 20 for note in notes)


def test_every_package_keeps_its_own_version(page: Page) -> None:
    again = next(section for section in page.sections if section.id == "again")
    facts = dict(next(block for block in again.blocks if block.kind == "facts").pairs)
    assert (facts["sglang"], facts["torch"]) == ("0.5.16", "2.11.0")


def test_a_grid_of_overrides_is_one_command(page: Page) -> None:
    again = next(section for section in page.sections if section.id == "again")
    lines = [block.lines for block in again.blocks if block.kind == "commands"]
    assert lines[1] == ("prefixbench run path=auto,cascade,full,stock prefix_len=128,8192 concurrency=8,32 -m",)


def test_sliders_start_at_the_measured_values(page: Page) -> None:
    widget = next(block for block in page.blocks() if isinstance(block, Widget) and block.name == "amdahl")
    row = next(r for r in widget.table.rows if r[1].text == "auto" and r[0].text.startswith("8,192 shared tokens, 32"))
    assert widget.data["f"] == row[3].value
    assert widget.data["s"] == row[4].value


def test_without_timers_the_sliders_say_that_they_start_at_reported_values() -> None:
    records = [r for path in ("stock", "cascade") for r in [serving_record(path)]]
    page = page_of(records)
    widget = next(block for block in page.blocks() if isinstance(block, Widget) and block.name == "amdahl")
    assert (widget.data["f"], widget.data["s"]) == (0.6, 15.6)
    assert any(isinstance(b, Note) and "not at ours" in b.text for b in page.blocks())


def test_json_has_no_nan_and_keeps_full_precision(page: Page) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(render.json(page), parse_constant=refuse)
    assert data["record_ids"] == list(page.record_ids)
    (block,) = [found for found in _blocks(data) if found.get("id") == "throughput-0-data"]
    means = [row[2]["value"] for row in block["rows"]]
    assert means == [cell.value for cell in column(table(page, "throughput-0-data"), "tokens/s")]
    assert any(not math.isclose(value, round(value, 3)) for value in means)


def _blocks(data: object) -> list[dict]:
    if isinstance(data, dict):
        return [data, *(b for value in data.values() for b in _blocks(value))]
    return [b for item in data for b in _blocks(item)] if isinstance(data, list) else []


def test_figures_are_valid_plotly(page: Page) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")

    def resolved(value: object) -> object:
        if isinstance(value, str):
            return "#123456" if value.startswith("$") else value
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list) else value

    charts = list(page.charts())
    assert len(charts) > 12
    for found in charts:
        graph_objects.Figure(resolved(found.figure))


def test_markdown_is_one_document_without_html_from_records(page: Page) -> None:
    text = markdown.markdown(page)
    assert text.startswith("# Read the shared prompt once\n")
    assert page.headline.figure in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows


def test_a_comparison_carries_the_verdict_of_the_gate() -> None:
    before = sweep(prefixes=(2048,), concurrencies=(32,), paths=("stock", "cascade"), launches=5)
    slower = [
        serving_record(
            "cascade", launch, [0.2, 0.2], prefix_tokens=2048, suffix_tokens=32, concurrency=32, model="tiny"
        )
        for launch in range(5)
    ]
    gate = next(s for s in page_of(before, before).sections if s.id == "gate")
    assert "Outcome of the gate: pass (exit code 0)" in gate.finding
    gate = next(s for s in page_of(slower, before).sections if s.id == "gate")
    assert "Outcome of the gate: not comparable (exit code 3)" in gate.finding
    reasons = next(block for block in gate.blocks if isinstance(block, Table) and block.id == "reasons-of-gate")
    assert any("GPU" in row[0].text for row in reasons.rows), "the builder's default machine has another GPU"


def test_a_failure_without_case_peers_does_not_break_the_page() -> None:
    page_of([wrap(serving_record().case, None, status="timeout")])


def test_the_host_that_planned_is_not_what_the_kernels_ran_on() -> None:
    planned = replace(dispatch(), environment=CPU, labels=("cpu",))
    with_served = build("mixed", Selected("all", (serving_record("full"), planned)))
    assert "on NVIDIA H200," in with_served.subtitle
    assert [name for name, _ in with_served.badges] == ["Random weights"]
    alone = build("planned", Selected("all", (planned,)))
    assert "on CPU: " in alone.subtitle
    assert [name for name, _ in alone.badges] == ["Ran on a CPU"]
