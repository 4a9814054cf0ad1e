"""What the judges of the scorecard share: the records that count, and what they can conclude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import pandas as pd

from prefixbench.analysis import frame
from prefixbench.analysis.claims.reported import Claim
from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import Interval
from prefixbench.record import Record

Verdict = Literal["reproduced", "differs", "not run here"]
NOT_MEASUREMENTS = ("fake-engine", "synthetic")


@dataclass(frozen=True)
class Finding:
    """What the records say about one claim; `measured` None means nothing to show, and `why` says why."""

    verdict: Verdict
    why: str
    measured: str | None = None
    estimate: Interval | None = None
    hardware: str | None = None
    record_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Records that are measurements, and the frames that every judgement reads."""

    records: tuple[Record, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Evidence:
        """What of `records` is a measurement."""
        return cls(tuple(r for r in records if not set(r.labels) & set(NOT_MEASUREMENTS)))

    @cached_property
    def blocks(self) -> pd.DataFrame:
        return frame.blocks(self.records, exclude=frame.UNTRUSTWORTHY)

    @cached_property
    def launches(self) -> pd.DataFrame:
        return frame.launches(self.blocks)

    @cached_property
    def points(self) -> list[Point]:
        return list(frame.points(self.launches))

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return frame.kernels(self.records)

    def gpu_points(self) -> list[Point]:
        return [point for point in self.points if is_gpu(str(point.key["device"]))]

    def gpu_kernels(self) -> pd.DataFrame:
        rows = self.kernels
        return rows if rows.empty else rows[rows["device"].map(is_gpu)]


Judge = Callable[[Claim, Evidence], Finding]


def is_gpu(device: str) -> bool:
    return not device.startswith("CPU")


def not_run(why: str, shown: Finding | None = None) -> Finding:
    """`shown` is something measured that does not settle the claim."""
    return Finding("not run here", why) if shown is None else replace(shown, verdict="not run here", why=why)


def figure(interval: Interval, text: str = "{:.2f}x") -> str:
    """The estimate with its interval where there is one."""
    if interval.estimate is None:
        return interval.note or "missing"
    shown = text.format(interval.estimate)
    if interval.low is None or interval.high is None:
        return f"{shown} (one launch, no interval)" if interval.n == 1 else shown
    return f"{shown} ({text.format(interval.low)} to {text.format(interval.high)}, n={interval.n})"
