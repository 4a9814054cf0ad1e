"""What the clock samples of a device say: which timings not to trust, and which slower clock was the work's own doing.

The power cap is no fault of the machine: work that draws more than the device may is slowed by it on every such device.
It is named and shown beside the figures, and alone never a reason to leave a timing out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from prefixbench.record import Telemetry, TelemetrySample

CLOCK_TOLERANCE = 0.03
"""A clock this far under the fastest one seen has fallen; boost clocks of a healthy GPU move by a 15 MHz step."""

IDLE_BIT = 0x1
POWER_CAP_BIT = 0x4
THROTTLE_BITS = {
    0x8: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
"""NVML's clock-event bits that make a timing invalid. Idle, fixed application clocks and display clocks do not."""

POWER_CAP = "power cap"
NOT_WATCHED = "not-watched"
"""The flag of a block that had no telemetry because that was asked for; nothing is known of its clocks."""
UNTRUSTWORTHY = ("throttled", "clock fell", "no valid samples")
"""How the flags begin that make a timing invalid."""

_BIT_LAG_S = 0.5  # on an H200 the bit of the power cap was seen up to 0.3 s after the clock that it explains


@dataclass(frozen=True)
class Clocks:
    """One block's clocks over all its devices; NaN where nothing was watched, idle samples left out.

    `power_w` is the highest reading (NVML's power is a moving average, so a mean depends on the block's length);
    `power_cap_share` is the part of the samples, from 0 to 1, in which the power cap was in force.
    """

    sm_clock_mhz: float
    power_w: float
    power_cap_share: float

    @classmethod
    def of(cls, telemetry: Sequence[Telemetry]) -> Clocks:
        working = [sample for watched in telemetry for sample in _working(watched)]
        clocks = [sample.sm_clock_mhz for sample in working if sample.sm_clock_mhz is not None]
        capped = [_is_capped(sample) for sample in working if sample.throttle_reasons is not None]
        return cls(
            sm_clock_mhz=fmean(clocks) if clocks else math.nan,
            power_w=max((sample.power_w for sample in working if sample.power_w is not None), default=math.nan),
            power_cap_share=fmean(capped) if capped else math.nan,
        )


def fastest_mhz(telemetry: Sequence[Telemetry]) -> int:
    """The highest SM clock of these samples; 0 when there is none."""
    clocks = (sample.sm_clock_mhz for watched in telemetry for sample in watched.samples)
    return max((clock for clock in clocks if clock is not None), default=0)


def clock_flags(telemetry: Sequence[Telemetry], fastest_mhz: int | None = None) -> tuple[str, ...]:
    """Plain-word flags, one for each thing that slowed a device; those of `UNTRUSTWORTHY` spoil the timings.

    `fastest_mhz` is the highest SM clock seen elsewhere in the comparison (the other arm, another block); without it
    the fastest sample here is the yardstick. Idle samples count for nothing. What was not watched raises no flag.
    A clock that fell while the power cap was in force belongs to the flag of the power cap.
    """
    return tuple(flag for watched in telemetry for flag in _device_flags(watched, fastest_mhz or 0))


def is_judged_by(telemetry: Sequence[Telemetry]) -> bool:
    """Whether these samples can tell a power cap from a fault: then they count, and not flags written earlier."""
    return any(sample.throttle_reasons is not None for watched in telemetry for sample in watched.samples)


def _device_flags(watched: Telemetry, fastest_elsewhere_mhz: int) -> list[str]:
    working = _working(watched)
    who, flags = f"GPU {watched.device}", []
    throttled = [names for sample in working if (names := _throttle_names(sample))]
    if throttled:
        said = ", ".join(sorted({name for names in throttled for name in names}))
        flags.append(f"throttled: {who}, {said} in {len(throttled)} of {len(working)} samples")
    if throttled and len(throttled) == len(working):
        flags.append(f"no valid samples: {who} was throttled in all {len(working)} samples")
    timed = [(sample.at_s, sample.sm_clock_mhz) for sample in working if sample.sm_clock_mhz is not None]
    capped_at_s = [sample.at_s for sample in working if _is_capped(sample)]
    fastest = max([fastest_elsewhere_mhz, *(clock for _, clock in timed)])
    fallen = [(at_s, clock) for at_s, clock in timed if clock < (1 - CLOCK_TOLERANCE) * fastest]
    unexplained = [clock for at_s, clock in fallen if not _is_near(at_s, capped_at_s)]
    if unexplained:
        flags.append(f"clock fell: {who}, {min(unexplained)} MHz where {fastest} MHz was seen")
    if capped_at_s:
        flags.append(f"{POWER_CAP}: {who}, in {len(capped_at_s)} of {len(working)} samples{_clock_range(timed)}")
    return flags


def _working(watched: Telemetry) -> list[TelemetrySample]:
    return [sample for sample in watched.samples if not (sample.throttle_reasons or 0) & IDLE_BIT]


def _is_capped(sample: TelemetrySample) -> bool:
    return bool((sample.throttle_reasons or 0) & POWER_CAP_BIT)


def _is_near(at_s: float, capped_at_s: Sequence[float]) -> bool:
    following = bisect_left(capped_at_s, at_s - _BIT_LAG_S)
    return following < len(capped_at_s) and capped_at_s[following] <= at_s + _BIT_LAG_S


def _throttle_names(sample: TelemetrySample) -> tuple[str, ...]:
    reasons = sample.throttle_reasons or 0
    return tuple(name for bit, name in THROTTLE_BITS.items() if reasons & bit)


def _clock_range(timed: Sequence[tuple[float, int]]) -> str:
    clocks = [clock for _, clock in timed]
    if not clocks:
        return ""
    return f", SM clock {min(clocks)} to {max(clocks)} MHz ({fmean(clocks):.0f} on average)"
