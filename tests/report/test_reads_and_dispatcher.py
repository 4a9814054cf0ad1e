"""Traffic over the lines N and 1, the map of the fastest path, the fitted threshold and the regret of rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.builders import CPU, kernel_record, serving_record, wrap
from prefixbench.case import DispatchCase
from prefixbench.record import DispatchMeasurement, Record, Traffic
from prefixbench.report.material import Material
from prefixbench.report.sections.dispatcher import dispatcher_section
from prefixbench.report.sections.reads import reads_section
from prefixbench.report.view import Cell, Chart, Note, Section, Switch, Table
from report.synthetic import kernels

PREFIX_BYTES = 2 * 8192 * 8 * 128 * 2


def blocks(section: Section, kind: type) -> list:
    return [block for block in section.blocks if isinstance(block, kind)]


def table(section: Section, name: str) -> Table:
    tables = [*blocks(section, Table), *(chart.table for chart in blocks(section, Chart))]
    return next(found for found in tables if found.id == name)


def column(found: Table, label: str) -> list[Cell]:
    index = [c.label for c in found.columns].index(label)
    return [row[index] for row in found.rows]


def reads_of(records: list[Record]) -> Section:
    return reads_section(Material(records, ""))


def test_traffic_is_divided_by_one_prefix_and_levels_stay_apart() -> None:
    records = [
        kernel_record("paged", batch=b, traffic=(Traffic("ncu", b * PREFIX_BYTES, 0, 3 * b * PREFIX_BYTES),))
        for b in (16, 64)
    ]
    section = reads_of(records)
    measured = table(section, "reads-data")
    assert [c.value for c in column(measured, "DRAM / prefix")] == [16, 64]
    assert [c.value for c in column(measured, "L2 / prefix")] == [48, 192]
    traces = {t["name"]: t["y"] for t in blocks(section, Chart)[0].figure["data"] if t["mode"] != "markers"}
    assert traces["paged, contiguous, DRAM"] == [16, 64]
    assert traces["paged, contiguous, L2"] == [48, 192]
    assert traces["N, once each"] == [16, 64]
    assert traces["1, once for all"] == [1, 1]


def test_without_counters_modelled_bytes_are_never_called_measured() -> None:
    section = reads_of([kernel_record("dense", traffic=(Traffic("model", PREFIX_BYTES, 0, None),))])
    assert any("hardware counters" in note.text for note in blocks(section, Note) if note.tone == "missing")
    assert {c.missing for c in column(table(section, "launches"), "DRAM read")} == {
        "no hardware counters were read for it"
    }
    assert all(chart.id != "reads-measured" for chart in blocks(section, Chart))


def test_an_unknown_dtype_has_no_ratio_instead_of_a_wrong_one() -> None:
    records = [kernel_record("paged", dtype="int3", traffic=(Traffic("ncu", 100, 0, 100),))]
    assert all(chart.id != "reads-measured" for chart in blocks(reads_of(records), Chart))


def test_bandwidth_above_the_copy_bandwidth_is_flagged() -> None:
    fast = kernel_record("dense", samples_us=[1.0, 1.0, 1.0])
    slow = kernel_record("dense", samples_us=[100.0], batch=64)
    shares = {row[0].text: row for row in table(reads_of([fast, slow]), "launches").rows}
    texts = [cell.text for cell in column(table(reads_of([fast, slow]), "launches"), "of copy bandwidth")]
    assert len(shares) == 2
    assert sorted(texts) == ["8%", "served from L2"]


def test_a_second_clock_stands_beside_ours_and_warns_where_it_says_otherwise() -> None:
    agreeing = replace(kernel_record("dense", samples_us=[100.0]), notes={"flashinfer_clock_us": 101.0})
    other = replace(kernel_record("dense", samples_us=[100.0], batch=64), notes={"flashinfer_clock_us": 120.0})
    cold = replace(kernel_record("dense", samples_us=[100.0], batch=8, l2="cold"), notes={"flashinfer_clock_us": 99.0})
    section = reads_of([agreeing, other, cold, kernel_record("paged")])
    values = [cell.value for cell in column(table(section, "launches"), "FlashInfer's clock")]
    assert values == [None, pytest.approx(1.2), None, pytest.approx(1.01)]
    (note,) = [block.text for block in blocks(section, Note) if block.tone == "warning"]
    assert "at 1 of 2 shapes that both timed, at worst 1.20×" in note
    assert not [b for b in blocks(reads_of([agreeing]), Note) if b.tone == "warning"]


def test_the_servers_count_is_a_count_and_not_a_measurement() -> None:
    section = reads_of([serving_record("cascade", concurrency=32)])
    assert column(table(section, "reads-counted-data"), "ratio")[0].value == 32
    assert "not a hardware measurement" in section.finding


def timed(*cells: tuple[int, float, float, float]) -> list[Record]:
    """(batch, paged, cascade, dense) in microseconds; M_eff is four times the batch."""
    return [
        kernel_record(name, samples_us=[us], batch=batch, layout="shared-contiguous")
        for batch, *times in cells
        for name, us in zip(("paged", "cascade", "dense"), times, strict=True)
    ]


def test_the_threshold_comes_with_the_interval_of_resampled_shapes() -> None:
    records = timed((4, 40, 10, 30), (16, 90, 20, 30), (64, 300, 60, 35), (256, 900, 200, 90))
    section = dispatcher_section(Material(records, ""))
    dense, sharing = table(section, "thresholds").rows
    assert dense[2].text == "256"
    assert "from M_eff = 256 on (95% interval 256 to" in section.finding
    assert [cell.text for cell in sharing[:3]] == ["reading once instead of stock", "8,192", "16"]
    never = dispatcher_section(Material(timed((4, 40, 10, 30), (16, 40, 10, 30)), ""))
    assert "never paid up to M_eff = 64" in never.finding


def test_the_map_is_coloured_by_what_was_fastest() -> None:
    records = [
        kernel_record(name, samples_us=[us], batch=batch, layout="shared-contiguous")
        for batch, times in ((16, {"cascade": 10.0, "dense": 20.0}), (256, {"cascade": 50.0, "dense": 20.0}))
        for name, us in times.items()
    ]
    section = dispatcher_section(Material(records, ""))
    chart = blocks(section, Chart)[0]
    assert [c.value for c in column(chart.table, "fastest")] == ["cascade", "dense"]
    assert [c.value for c in column(chart.table, "M_eff")] == [64, 1024]
    assert [c.text for c in column(chart.table, "query / KV heads")] == ["32/8", "32/8"]
    outlined = [s["line"]["width"] > 0 for s in chart.figure["layout"]["shapes"]]
    assert outlined == [False, True], "only what reaches the reported 1024"
    assert [s["fillcolor"] for s in chart.figure["layout"]["shapes"]] == ["$cascade", "$dense"]


def test_regret_is_what_a_rule_loses_against_the_fastest() -> None:
    section = dispatcher_section(Material(timed((16, 80, 10, 20), (256, 70, 50, 20)), ""))
    rows = {row[0].text: row for row in table(section, "regret").rows}
    assert rows["always cascade"][1].value == pytest.approx(60 / 30 - 1)
    assert rows["always cascade"][2].value == pytest.approx(1.5)
    assert rows["always dense"][5].value == 0.5
    assert rows["always stock"][4].value == 0
    assert rows["full: dense from M_eff 1024, else cascade"][1].value == 0
    assert rows["full: dense from M_eff 1024, else cascade"][4].value == 1
    assert rows["fitted here: dense from M_eff 1,024, else cascade"][1].value == 0
    assert "auto" in rows


def test_stock_can_be_the_fastest_of_the_map_and_is_named() -> None:
    section = dispatcher_section(Material(timed((1, 5, 10, 20), (256, 70, 50, 20)), ""))
    chart = blocks(section, Chart)[0]
    assert [c.value for c in column(chart.table, "fastest")] == ["stock", "dense"]
    assert "stock is paged" in chart.caption


def test_without_stock_no_regret_is_given_and_two_devices_are_not_mixed() -> None:
    pair = [r for r in timed((16, 80, 10, 20)) if r.case.implementation != "paged"]  # type: ignore[union-attr]
    section = dispatcher_section(Material(pair, ""))
    assert any("no shape was timed with stock" in note.text for note in blocks(section, Note))
    on_cpu = [replace(r, environment=CPU) for r in timed((16, 1, 2, 3), (64, 1, 2, 3))]
    chart = blocks(dispatcher_section(Material([*pair, *on_cpu], "")), Chart)[0]
    assert "NVIDIA H200" in chart.caption
    assert len(chart.table.rows) == 1


def test_what_deciding_and_planning_cost_is_told_where_it_was_timed() -> None:
    case = DispatchCase("auto", 1, 512, "none", 8192, 64, 32, 8, 128, {})
    records = [
        wrap(case, DispatchMeasurement((us, us), 100, (50.0, 60.0), False, "dense"), launch)
        for launch, us in enumerate((0.5, 0.7))
    ]
    row = table(dispatcher_section(Material(records, "")), "decision-cost").rows[0]
    assert row[5].value == pytest.approx(0.6)
    assert row[7].value == pytest.approx(55)
    assert row[4].path == "dense"


def test_copies_of_the_prefix_stay_out_of_the_map() -> None:
    records = [
        kernel_record("dense", samples_us=[1.0], layout="unique"),
        kernel_record("dense", samples_us=[20.0], layout="shared-contiguous"),
        kernel_record("cascade", samples_us=[10.0], layout="shared-slots"),
    ]
    chart = blocks(dispatcher_section(Material(records, "")), Chart)[0]
    assert column(chart.table, "fastest")[0].value == "cascade"


def test_several_prefixes_become_a_switch_and_none_a_reason() -> None:
    several = kernels(batches=(16,), groups=(1,), prefix=512) + kernels(batches=(16,), groups=(1,), prefix=8192)
    (switch,) = blocks(dispatcher_section(Material(several, "")), Switch)
    assert [label for label, _ in switch.options] == ["512 tokens", "8,192 tokens"]
    nothing = dispatcher_section(Material([serving_record("full")], ""))
    assert any(note.tone == "missing" for note in blocks(nothing, Note))
    assert any("M_eff = 1024" in note.text for note in blocks(nothing, Note))
