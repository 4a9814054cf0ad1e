"""Traffic over the lines N and 1, the map of the fastest kernel, the fitted threshold and the regret of rules."""

from __future__ import annotations

import math

import pytest

from harness.builders import kernel_record, serving_record
from prefixbench.record import Record, Traffic
from prefixbench.report.dispatcher import Shape, best_threshold, dispatcher_section, fit_threshold
from prefixbench.report.material import Material
from prefixbench.report.reads import reads_section
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
    assert traces["paged, DRAM"] == [16, 64]
    assert traces["paged, L2"] == [48, 192]
    assert traces["N, once each"] == [16, 64]
    assert traces["1, once for all"] == [1, 1]


def test_without_counters_modelled_bytes_are_never_called_measured() -> None:
    section = reads_of([kernel_record("dense", traffic=(Traffic("model", PREFIX_BYTES, 0, None),))])
    assert any("hardware counters" in note.text for note in blocks(section, Note) if note.tone == "missing")
    assert {c.missing for c in column(table(section, "launches"), "DRAM read")} == {
        "no hardware counters were read for it"
    }
    assert all(chart.id != "reads" for chart in blocks(section, Chart))


def test_an_unknown_dtype_has_no_ratio_instead_of_a_wrong_one() -> None:
    records = [kernel_record("paged", dtype="int3", traffic=(Traffic("ncu", 100, 0, 100),))]
    assert all(chart.id != "reads" for chart in blocks(reads_of(records), Chart))


def test_bandwidth_above_the_copy_bandwidth_is_flagged() -> None:
    fast = kernel_record("dense", samples_us=[1.0, 1.0, 1.0])
    slow = kernel_record("dense", samples_us=[100.0], batch=64)
    shares = {row[0].text: row for row in table(reads_of([fast, slow]), "launches").rows}
    texts = [cell.text for cell in column(table(reads_of([fast, slow]), "launches"), "of copy bandwidth")]
    assert len(shares) == 2
    assert sorted(texts) == ["8%", "served from L2"]


def test_the_servers_count_is_a_count_and_not_a_measurement() -> None:
    section = reads_of([serving_record("cascade", concurrency=32)])
    assert column(table(section, "reads-counted-data"), "ratio")[0].value == 32
    assert "not a hardware measurement" in section.finding


def shape(m_eff: int, cascade: float, dense: float) -> Shape:
    return Shape(8192, m_eff, 1, {"cascade": cascade, "dense": dense}, {})


def by_launch(m_eff: int, **us: dict[str, float]) -> Shape:
    return Shape(8192, m_eff, 1, {name: sum(times.values()) / len(times) for name, times in us.items()}, us)


def test_the_threshold_costs_least_in_sum() -> None:
    shapes = [shape(16, 10, 30), shape(64, 20, 30), shape(256, 60, 35), shape(1024, 200, 90)]
    assert best_threshold(shapes) == 256
    assert best_threshold([shape(16, 10, 30)]) == math.inf
    assert best_threshold([shape(16, 30, 10)]) == 16


def test_the_spread_of_the_threshold_comes_from_single_launches() -> None:
    noisy = [
        Shape(
            8192, 64, 1, {"cascade": 30.0, "dense": 29.0}, {"cascade": {"a": 29, "b": 31}, "dense": {"a": 30, "b": 28}}
        ),
        Shape(
            8192, 256, 1, {"cascade": 60.0, "dense": 30.0}, {"cascade": {"a": 60, "b": 60}, "dense": {"a": 30, "b": 30}}
        ),
    ]
    fitted = fit_threshold(noisy)
    assert fitted is not None
    assert (fitted.m_eff, fitted.low, fitted.high, fitted.launches) == (64, 64, 256, 2)
    assert fit_threshold([Shape(8192, 64, 1, {"cascade": 1.0, "paged": 2.0}, {})]) is None


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
    outlined = [s["line"]["width"] > 0 for s in chart.figure["layout"]["shapes"]]
    assert outlined == [False, True], "only what reaches the reported 1024"
    assert [s["fillcolor"] for s in chart.figure["layout"]["shapes"]] == ["$cascade", "$dense"]


def test_regret_is_what_a_rule_loses_against_the_fastest() -> None:
    records = [
        kernel_record(name, samples_us=[us], batch=batch, layout="shared-contiguous")
        for batch, times in ((16, {"cascade": 10.0, "dense": 20.0}), (256, {"cascade": 50.0, "dense": 20.0}))
        for name, us in times.items()
    ]
    rows = {row[0].text: row for row in table(dispatcher_section(Material(records, "")), "regret").rows}
    assert rows["always cascade"][1].value == pytest.approx(60 / 30 - 1)
    assert rows["always cascade"][2].value == pytest.approx(1.5)
    assert rows["always dense"][3].value == 0.5
    assert rows["reported: dense from M_eff 1,024"][1].value == 0


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
