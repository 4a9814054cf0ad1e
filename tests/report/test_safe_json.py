"""Embedded JSON: parses everywhere, cannot end the script element, knows no NaN."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbench.report.safe_json import clean, dumps, dumps_for_script

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028\u2029", "&lt;", "\ud83d", "\x00"]


def refuse(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_become_missing(value: float) -> None:
    assert json.loads(dumps({"x": [value]}), parse_constant=refuse) == {"x": [None]}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_inside_its_script_element(text: str) -> None:
    embedded = dumps_for_script({text: text})
    assert not set("<>&\u2028\u2029") & set(embedded)
    expected = text.encode("utf-8", "replace").decode()
    assert json.loads(embedded) == {expected: expected}


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_any_data_survives(data: object) -> None:
    assert json.loads(dumps_for_script(data), parse_constant=refuse) == clean(data)


def test_dataclasses_and_numpy_become_plain() -> None:
    @dataclass
    class Item:
        name: str
        value: np.int64

    assert clean([Item("a", np.int64(3))]) == [{"name": "a", "value": 3}]


def test_unknown_types_are_refused() -> None:
    with pytest.raises(TypeError, match="set has no JSON form"):
        clean({1})
