"""The cost model against hand arithmetic, its monotonicity, and profiles as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixonce import DecodeStep, Limits, Mode, Path, PrefixGroup, Segment, choose
from prefixonce.cost import CONSERVATIVE, load_profile
from prefixonce.errors import UnsupportedError


def shared(rows: int, tokens: int, kv_heads: int = 8) -> tuple[DecodeStep, PrefixGroup]:
    group = PrefixGroup(tuple(range(rows)), tokens, (Segment(1, tokens),) if tokens else ())
    return DecodeStep((tokens + 1,) * rows, 4 * kv_heads, kv_heads, 128, (group,)), group


def test_hand_arithmetic() -> None:
    step, group = shared(256, 8192)
    kv_bytes = 8192 * 8 * 128 * 2 * 2
    assert CONSERVATIVE.group_us(step, group, Path.STOCK) == pytest.approx(256 * kv_bytes / 12e6)
    flops = 4 * 1024 * 8192 * 8 * 128
    assert CONSERVATIVE.group_us(step, group, Path.DENSE) == pytest.approx(flops / 100e6 + 3.0)
    few, small = shared(2, 8192)
    tile_flops = 4 * 64 * 8192 * 8 * 128
    assert CONSERVATIVE.group_us(few, small, Path.DENSE) == pytest.approx(max(tile_flops / 100e6, kv_bytes / 1e6) + 3.0)


@given(
    rows=st.integers(2, 512),
    tokens=st.integers(1, 16384),
    heads=st.sampled_from([1, 2, 4, 8]),
    path=st.sampled_from(Path),
)
def test_more_rows_or_tokens_never_cost_less(rows: int, tokens: int, heads: int, path: Path) -> None:
    cost = CONSERVATIVE.group_us(*shared(rows, tokens, heads), path)
    assert 0 < cost <= CONSERVATIVE.group_us(*shared(rows + 1, tokens, heads), path)
    assert cost <= CONSERVATIVE.group_us(*shared(rows, tokens + 1, heads), path)


@pytest.mark.parametrize(("rows", "tokens", "is_shared"), [(256, 16384, True), (256, 64, False), (2, 512, False)])
def test_conservative_auto_shares_only_large_gains(rows: int, tokens: int, is_shared: bool) -> None:
    step, _ = shared(rows, tokens)
    assert (choose(step, Mode.AUTO, Limits(), CONSERVATIVE).path is not Path.STOCK) is is_shared


def test_a_profile_survives_its_file(tmp_path: FilePath) -> None:
    CONSERVATIVE.dump(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == CONSERVATIVE


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: d.pop("dense"), "dense"),
    (lambda d: d.update(extra=1), "extra"),
    (lambda d: d.update(stock_bytes_per_us=0), "stock_bytes_per_us is 0; it must be positive"),
    (lambda d: d["cascade"].update(step_us=-1.0), "step_us is -1.0"),
])  # fmt: skip
def test_a_broken_profile_is_one_line_naming_file_and_field(tmp_path: FilePath, damage, message: str) -> None:
    file = tmp_path / "p.json"
    CONSERVATIVE.dump(file)
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    with pytest.raises(UnsupportedError, match=message) as caught:
        load_profile(file)
    assert "p.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_torn_file_is_one_line(tmp_path: FilePath) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text(json.dumps({"device": "x"})[:-3])
    for file in (tmp_path / "none.json", torn, tmp_path):
        with pytest.raises(UnsupportedError, match=file.name):
            load_profile(file)


def test_overhead_may_be_zero(tmp_path: FilePath) -> None:
    free = replace(CONSERVATIVE, dense=replace(CONSERVATIVE.dense, step_us=0.0))
    free.dump(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").step_us(Path.DENSE) == 0.0
