"""Clocks: a machine that failed the work, work that hit the power cap, and neither."""

from __future__ import annotations

import math

import pytest

from prefixbench.machine.clocks import UNTRUSTWORTHY, Clocks, clock_flags, fastest_mhz, is_judged_by
from prefixbench.record import Telemetry, TelemetrySample

IDLE, CAP, THERMAL = 0x1, 0x4, 0x40


def watched(*readings: tuple[int, int | None], power_w: float | None = None) -> tuple[Telemetry, ...]:
    """(SM clock, clock-event bits), a tenth of a second apart."""
    samples = (
        TelemetrySample(i / 10, sm_clock_mhz=clock, throttle_reasons=bits, power_w=power_w)
        for i, (clock, bits) in enumerate(readings)
    )
    return (Telemetry("nvml", 0.1, 0, tuple(samples)),)


def test_a_healthy_gpu_raises_no_flag_and_idle_samples_do_not_count() -> None:
    assert clock_flags(watched((345, IDLE), (1980, 0), (1965, 0))) == ()


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        (0x8, "hardware slowdown"),
        (0x20, "software thermal limit"),
        (THERMAL, "hardware thermal"),
        (0x80, "power brake"),
    ],
)
def test_limits_of_the_machine_spoil_a_timing(bit: int, name: str) -> None:
    flags = clock_flags(watched((1980, 0), (1580, bit), (1580, bit | CAP)))
    assert any(flag.startswith(f"throttled: GPU 0, {name}") and "in 2 of 3 samples" in flag for flag in flags)
    everything = clock_flags(watched((1580, bit), (1580, bit)))
    assert any(flag.startswith("no valid samples: GPU 0") for flag in everything)


def test_a_power_cap_is_named_with_its_clocks_and_spoils_nothing() -> None:
    readings = [(1980, 0)] * 3 + [(1665, CAP), (1725, CAP)]
    (flag,) = clock_flags(watched(*readings))
    assert flag == "power cap: GPU 0, in 2 of 5 samples, SM clock 1665 to 1980 MHz (1866 on average)"
    assert not flag.startswith(UNTRUSTWORTHY)
    assert not any(f.startswith(UNTRUSTWORTHY) for f in clock_flags(watched((1580, CAP), (1580, CAP))))


def test_a_clock_that_fell_just_before_its_bit_showed_is_explained_one_that_fell_alone_is_not() -> None:
    late_bit = [(1980, 0), (1860, 0), (1860, 0), (1890, CAP)]
    assert [flag.partition(":")[0] for flag in clock_flags(watched(*late_bit))] == ["power cap"]
    long_after = [*late_bit, *[(1980, 0)] * 6, (1500, 0)]
    assert "clock fell: GPU 0, 1500 MHz where 1980 MHz was seen" in clock_flags(watched(*long_after))


def test_a_slow_arm_is_caught_by_the_clock_of_the_other_arm() -> None:
    slow, fast = watched((1580, 0)), watched((1980, 0))
    assert clock_flags(slow) == ()
    assert clock_flags(slow, fastest_mhz(fast)) == ("clock fell: GPU 0, 1580 MHz where 1980 MHz was seen",)


def test_each_gpu_is_judged_alone() -> None:
    (hot,) = watched((1980, 0), (1400, THERMAL))
    (cool,) = watched((1980, 0))
    assert {flag.partition(":")[0] for flag in clock_flags((cool, hot))} == {"throttled", "clock fell"}


def test_means_leave_idle_samples_out_and_power_is_the_highest_reading() -> None:
    clocks = Clocks.of(watched((345, IDLE), (1980, 0), (1780, CAP), power_w=650.0))
    assert (clocks.sm_clock_mhz, clocks.power_w, clocks.power_cap_share) == (1880, 650, 0.5)
    unwatched = Clocks.of((Telemetry("none", 0.1, 0, (), "no driver"),))
    assert all(math.isnan(value) for value in (unwatched.sm_clock_mhz, unwatched.power_w, unwatched.power_cap_share))


def test_samples_without_reasons_cannot_overrule_what_was_written_down() -> None:
    assert is_judged_by(watched((1980, 0)))
    assert not is_judged_by(watched((1980, None)))
    assert not is_judged_by(())
