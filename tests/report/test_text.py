"""Numbers, cells and Markdown: one spelling, absences with reasons, text that stays text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbench.report import cells, words
from prefixbench.report.figures import Axis, Point, Series, lines, plain
from prefixbench.report.markdown import escape


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1360, "1,360"),
        (1360.4, "1,360"),
        (2.164, "2.16"),
        (0.0123456, "0.0123"),
        (0, "0"),
        (math.nan, "—"),
        (None, "—"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(("value", "text"), [(8.59e9, "8.59 GB"), (37.7e6, "37.7 MB"), (512, "512 B"), (None, "—")])
def test_bytes(value: float | None, text: str) -> None:
    assert words.bytes_si(value) == text


def test_an_absent_value_always_has_a_reason() -> None:
    assert cells.amount(None, "no decode step").missing == "no decode step"
    assert cells.amount(None).missing == "not recorded"
    assert cells.interval(None, None, "one launch").missing == "one launch"
    table = cells.table(
        "t", "c", ("a", "b"), [[cells.missing("x"), cells.missing("y")], [cells.missing("x"), cells.text("")]]
    )
    assert table.missing_reasons == ("x", "y")


def test_columns_of_numbers_are_set_right_and_long_tables_folded() -> None:
    rows = [[cells.amount(1), cells.text("a"), cells.missing("r")] for _ in range(20)]
    table = cells.table("t", "c", ("n", "t", "m"), rows)
    assert [column.numeric for column in table.columns] == [True, False, True]
    assert table.folded
    assert not cells.table("t", "c", ("n", "t", "m"), rows[:3]).folded


@given(st.text())
def test_markdown_text_stays_text_on_one_line(text: str) -> None:
    escaped = escape(text)
    assert "\n" not in escaped
    assert "<" not in escaped
    for mark in "|*_`[":
        assert escaped.count(mark) == escaped.count(f"\\{mark}")


def test_plotly_texts_from_records_carry_no_markup_and_no_template() -> None:
    assert plain('<a href="x">%{x}') == '&lt;a href="x">% {x}'


def test_a_missing_point_is_a_gap_and_one_launch_has_no_bar() -> None:
    series = Series("a", "stock", (Point(1, 2.0, 1.5, 2.5, (1.9, 2.1)), Point(2, None), Point(3, 4.0)))
    raw, means = lines([series], Axis("x"), Axis("y"))["data"]
    assert means["y"] == [2.0, None, 4.0]
    assert means["error_y"]["array"] == [0.5, None, None]
    assert means["error_y"]["arrayminus"] == [0.5, None, None]
    assert (raw["x"], raw["y"]) == ([1, 1], [1.9, 2.1])
