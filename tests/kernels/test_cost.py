"""The cost model against hand arithmetic, its monotonicity, and profiles as files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixonce import DecodeStep, Limits, Mode, Path, PrefixGroup, Segment, SlotPiece, choose, cost
from prefixonce.cost import CONSERVATIVE, OWN_TOKENS, Layer, load_profile, profile_for
from prefixonce.errors import UnsupportedError


def shared(rows: int, tokens: int, kv_heads: int = 8) -> tuple[DecodeStep, PrefixGroup]:
    group = PrefixGroup(tuple(range(rows)), tokens, (Segment(1, tokens),) if tokens else ())
    return DecodeStep((tokens + 1,) * rows, 4 * kv_heads, kv_heads, 128, (group,)), group


def test_stock_by_hand() -> None:
    step, group = shared(256, 8192)
    token_bytes = 8 * 128 * 2 * 2
    own_us = math.hypot(256 * 8 * 0.01, 256 * OWN_TOKENS * token_bytes / 2e6)
    prefix_us = 8192 * token_bytes / 2e6 + 255 * 8192 * token_bytes / 12e6
    assert CONSERVATIVE.group_us(step, group, Path.STOCK) == pytest.approx(own_us + prefix_us)


@pytest.mark.parametrize(("rows", "tiles", "parts"), [
    (256, 8, 100 / (8 * 8)),  # the whole device is busy: 8 tiles x 8 heads leave each at most this many processors
    (2, 1, 100 / 8),
])  # fmt: skip
def test_sharing_by_hand(rows: int, tiles: int, parts: float) -> None:
    step, group = shared(rows, 8192)
    token_bytes = 8 * 128 * 2 * 2
    own_us = math.hypot(rows * 8 * 0.01, rows * OWN_TOKENS * token_bytes / 2e6)
    tile_us = 4 * 128 * 8192 * 128 / (100e6 / 100)  # one tile and head by one processor
    prefix_us = math.hypot(tile_us / parts, 8192 * token_bytes / 2e6) + 0.3 * max(1.0, parts)
    merge_us = rows * 32 * 128 * 16 / 1e6
    assert tile_us / parts == pytest.approx(4 * tiles * 128 * 8192 * 8 * 128 / 100e6)
    assert CONSERVATIVE.group_us(step, group, Path.DENSE) == pytest.approx(own_us + prefix_us + merge_us)
    assert CONSERVATIVE.step_us(Path.DENSE) == 25.0


def test_a_prefix_is_cut_no_finer_than_pays() -> None:
    """One tile and one KV head of 128 key blocks: parts = sqrt(work / cost of a part), not all processors."""
    cheap = replace(CONSERVATIVE, shared=replace(CONSERVATIVE.shared, split_us=1.0, cascade_flops_per_us=1e9))
    layer = Layer(1, 128 * 128, 0, q_heads=1, kv_heads=1, head_dim=128, own_tokens=0)
    part_us = 4 * 128 * 128 * 128 * 128 / (1e9 / 100)
    read_us = 128 * 128 * 512 / 2e6
    parts = math.sqrt(part_us)
    assert 1 < parts < 100
    expected = 30.0 + 0.01 + math.hypot(part_us / parts, read_us) + parts + 128 * 16 / 1e6
    assert cheap.layer_us(layer, Path.CASCADE) == pytest.approx(expected)


def test_dense_reads_only_runs_at_its_own_rate() -> None:
    run, loose = Segment(1, 4096), SlotPiece(slots=None, length_tokens=4096)  # type: ignore[arg-type]
    groups = [PrefixGroup(tuple(range(256)), 8192, pieces) for pieces in ((run, run), (run, loose), (loose, loose))]
    step = DecodeStep((8193,) * 256, 32, 8, 128)
    dense, mixed, none = (CONSERVATIVE.group_us(step, group, Path.DENSE) for group in groups)
    assert dense < mixed < none
    assert none == CONSERVATIVE.group_us(step, groups[0], Path.CASCADE)


@given(
    rows=st.integers(2, 512),
    tokens=st.integers(1, 16384),
    heads=st.sampled_from([1, 2, 4, 8]),
    path=st.sampled_from(Path),
)
def test_more_rows_or_tokens_never_cost_less(rows: int, tokens: int, heads: int, path: Path) -> None:
    price = CONSERVATIVE.group_us(*shared(rows, tokens, heads), path)
    assert 0 < price <= CONSERVATIVE.group_us(*shared(rows + 1, tokens, heads), path)
    assert price <= CONSERVATIVE.group_us(*shared(rows, tokens + 1, heads), path)


@pytest.mark.parametrize(("rows", "tokens", "is_shared"), [(256, 16384, True), (256, 64, False), (2, 512, False)])
def test_conservative_auto_shares_only_large_gains(rows: int, tokens: int, is_shared: bool) -> None:
    step, _ = shared(rows, tokens)
    assert (choose(step, Mode.AUTO, Limits(), CONSERVATIVE).path is not Path.STOCK) is is_shared


def test_a_profile_survives_its_file(tmp_path: FilePath) -> None:
    CONSERVATIVE.dump(tmp_path / "p.json", {"date": "today", "launches": ["a"]})
    assert load_profile(tmp_path / "p.json") == CONSERVATIVE


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: d.pop("stock"), "stock"),
    (lambda d: d.update(extra=1), "extra"),
    (lambda d: d.update(memory_bytes_per_us=0), "memory_bytes_per_us is 0; it must be a positive number"),
    (lambda d: d["shared"].update(split_us=-1.0), "split_us is -1.0"),
    (lambda d: d["shared"].update(split_us="fast"), "split_us is 'fast'"),
    (lambda d: d["stock"].update(row_us=math.inf), "row_us is inf"),
    (lambda d: d.update(processors=True), "processors is True"),
    (lambda d: d.update(device=7), "device is 7; it must be text"),
    (lambda d: d.pop("schema"), "schema 1, this version reads 2: calibrate again"),
])  # fmt: skip
def test_a_broken_or_old_profile_is_one_line_naming_file_and_field(tmp_path: FilePath, damage, message: str) -> None:
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
    listed = tmp_path / "list.json"
    listed.write_text("[]")
    for file in (tmp_path / "none.json", torn, listed, tmp_path):
        with pytest.raises(UnsupportedError, match=file.name):
            load_profile(file)


def test_a_gpu_gets_the_profile_shipped_under_its_name(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SHIPPED", tmp_path)
    measured = replace(CONSERVATIVE, device="NVIDIA X1 (80 GB)", source="measured")
    measured.dump(tmp_path / "nvidia-x1-80-gb.json")
    assert profile_for("NVIDIA X1 (80 GB)") == measured
    assert profile_for("NVIDIA X1 80 GB") is CONSERVATIVE  # the same file name, another device
    assert profile_for("NVIDIA X2") is CONSERVATIVE
    assert "prefixbench calibrate" in CONSERVATIVE.source


def test_every_shipped_profile_can_be_read_and_names_its_device() -> None:
    for file in cost.SHIPPED.glob("*.json"):
        profile = load_profile(file)
        assert profile_for(profile.device) == profile
