"""Tidy frames: nothing is lost, exclusion is a rule that shows, paths of one point stand together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.builders import CPU, kernel_record, serving_record
from prefixbench.analysis import frame
from prefixbench.record import Telemetry, TelemetrySample, Traffic


def test_one_row_per_block_and_one_per_record() -> None:
    records = [serving_record("cascade", launch, [0.01, 0.02]) for launch in range(3)]
    blocks = frame.blocks(records)
    launches = frame.launches(blocks)
    assert (len(blocks), len(launches)) == (6, 3)
    assert launches["decode_tok_s"].tolist() == pytest.approx([600] * 3), "mean of 800 and 400"
    assert launches["share_cascade"].tolist() == [1.0] * 3
    assert set(launches["device"]) == {"NVIDIA H200"}


def test_flagged_blocks_are_left_out_only_by_rule_and_counted() -> None:
    good, bad = (
        serving_record("cascade", 0, [0.01, 0.01]),
        serving_record("cascade", 1, 0.02, flags=("throttled: GPU 0",)),
    )
    plain = frame.launches(frame.blocks([good, bad]))
    assert plain["blocks_excluded"].tolist() == [0, 0]
    assert plain["decode_tok_s"].tolist() == pytest.approx([800, 400])
    ruled = frame.launches(frame.blocks([good, bad], exclude=frame.UNTRUSTWORTHY))
    assert ruled["blocks_excluded"].tolist() == [0, 1]
    assert math.isnan(ruled["decode_tok_s"][1])
    assert ruled["exclusions"][1] == ("throttled: GPU 0",)


def test_the_same_path_twice_is_the_same_whatever_the_order_and_a_cold_cache_is_no_gain() -> None:
    """Blocks A, B and B, A of one server; then the second run of A, fast because the first warmed the cache for it."""
    there, back = (
        frame.launches(frame.blocks([serving_record("cascade", 0, s)])) for s in ([0.01, 0.02], [0.02, 0.01])
    )
    assert there["decode_tok_s"][0] == back["decode_tok_s"][0]
    first = serving_record("cascade", 0, 0.02, flags=("cold-cache: hit rate 0.0",), cache_state="flushed")
    second = serving_record("cascade", 1, 0.01, cache_state="flushed, primed 1 prefix")
    rows = frame.launches(frame.blocks([first, second], exclude=frame.UNTRUSTWORTHY))
    assert rows["blocks_excluded"].tolist() == [1, 0]
    assert list(frame.sample(rows)) == ["launch-01"]
    assert rows["cache_state"].tolist() == ["", "flushed, primed 1 prefix"]


def watched(*readings: tuple[int, int | None]) -> tuple[Telemetry, ...]:
    samples = (TelemetrySample(i / 10, clock, throttle_reasons=bits) for i, (clock, bits) in enumerate(readings))
    return (Telemetry("nvml", 0.1, 0, tuple(samples)),)


def test_clocks_are_judged_from_samples_not_from_what_was_written_down() -> None:
    old = ("cold-cache", "throttled: GPU 0, power cap in 2 of 3 samples", "clock fell: GPU 0, 1665 MHz")
    by_cap = serving_record("full", flags=old[1:], telemetry=watched((1980, 0), (1665, 0x4), (1700, 0x4)))
    hot = serving_record("full", 1, flags=(), telemetry=watched((1980, 0), (1665, 0x40), (1700, 0x40)))
    unreadable = serving_record("full", 2, flags=old, telemetry=watched((1980, None)))
    rows = frame.blocks([by_cap, hot, unreadable], exclude=frame.UNTRUSTWORTHY)
    assert rows["excluded"].tolist() == [False, True, True]
    assert rows["flags"][0] == ("power cap: GPU 0, in 2 of 3 samples, SM clock 1665 to 1980 MHz (1782 on average)",)
    assert rows["flags"][2] == old
    launches = frame.launches(rows)
    assert launches["power_cap_share"][0] == pytest.approx(2 / 3)
    assert launches["sm_clock_mhz"][0] == pytest.approx(1781.7, abs=0.1)


def test_a_block_at_a_low_clock_is_found_out_by_the_launch_that_it_belongs_to() -> None:
    slow = serving_record("cascade", telemetry=watched((1580, 0)))
    fast = serving_record("stock", telemetry=watched((1980, 0)))
    elsewhere = serving_record("stock", launch=1, telemetry=watched((1980, 0)))
    assert frame.blocks([slow, fast], exclude=frame.UNTRUSTWORTHY)["excluded"].tolist() == [True, False]
    assert frame.blocks([slow, elsewhere], exclude=frame.UNTRUSTWORTHY)["excluded"].tolist() == [False, False]


def test_paths_of_a_point_are_paired_and_stock_is_the_unmodified_one() -> None:
    records = [
        serving_record(path, launch, 0.01 * factor, plugin=plugin, launch_id=f"{'on' if plugin else 'off'}-{launch}")
        for launch in range(3)
        for path, factor, plugin in (("stock", 2.0, False), ("stock", 2.1, True), ("cascade", 1.0, True))
    ]
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    assert sorted(point.arms) == ["cascade", "stock", "stock+plugin"]
    assert point.sample("cascade").keys() == point.sample("stock+plugin").keys()
    assert point.sample("cascade").keys().isdisjoint(point.sample("stock"))
    assert point.step_shares("cascade") == {"stock": 0, "paged": 0, "cascade": 1, "dense": 0}
    assert point.step_shares("stock") is None, "nothing counts without the plugin"
    assert len(point.record_ids("cascade")) == 3


def test_plugin_settings_make_variants_not_points() -> None:
    engine = {"page_size": 1}
    stock = serving_record("stock", plugin=False, engine_settings=engine)
    tuned = [serving_record("full", engine_settings={**engine, "dense_m_eff": m}) for m in (512, 1024)]
    found = list(frame.points(frame.launches(frame.blocks([stock, *tuned]))))
    assert [p.arms for p in found] == [["stock", "full"], ["stock", "full"]]
    assert len({p.variant for p in found}) == 2


def test_realized_m_eff_needs_the_head_counts() -> None:
    with_heads = serving_record("cascade", model_settings={"heads": 32, "kv_heads": 8})
    rows = frame.blocks([with_heads, serving_record("cascade")])
    assert rows["m_eff"][0] == 32
    assert math.isnan(rows["m_eff"][1])


def test_missing_figures_say_why() -> None:
    rows = frame.blocks([serving_record("stock", plugin=False, output_tokens=1)])
    assert math.isnan(rows["decode_tok_s"][0])
    assert "decode_tok_s: no decode step" in rows["missing"][0]
    assert frame.launches(rows)["blocks_used"].tolist() == [1]


def test_records_without_measurement_are_not_rows() -> None:
    failed = replace(serving_record(status="oom"), measurement=None)
    assert frame.blocks([failed]).empty
    assert frame.launches(frame.blocks([failed])).empty
    assert list(frame.points(frame.launches(frame.blocks([])))) == []


def test_kernel_rows_carry_rates_and_flag_the_l2_cache() -> None:
    counted = (Traffic("model", 1, 0, None), Traffic("ncu", 40_000_000, 0, 90_000_000))
    shared = kernel_record("dense", samples_us=[50.0, 60.0, 70.0], traffic=counted)
    small = kernel_record("paged", samples_us=[5.0], prefix_tokens=4096)
    rows = frame.kernels([shared, small, serving_record()])
    assert len(rows) == 2
    assert rows["kernel_us"][0] == 60
    assert rows["m_eff"][0] == 1024
    assert (rows["dram_read_bytes"][0], rows["l2_read_bytes"][0]) == (40e6, 90e6)
    assert rows["bytes_per_s"][1] == pytest.approx(2 * 4096 * 8 * 128 * 2 / 5e-6)
    assert rows["served_from_l2"].tolist() == [False, False]
    faster = frame.kernels([kernel_record("paged", samples_us=[3.0], prefix_tokens=4096)])
    assert faster["served_from_l2"].tolist() == [True], "16 MiB in 3 us is more than the memory can do"


def test_device_names() -> None:
    assert frame.device_name(CPU) == "CPU: Some CPU"
    assert frame.device_name(replace(CPU, gpus=(serving_record().environment.gpus[0],) * 2)) == "2 x NVIDIA H200"
