"""Why a 15.6x kernel makes a 2.16x server: Amdahl's law with measured shares, and the contradictions it exposes.

speedup = 1 / ((1 - f) + f / s), with f the share of a stock decode step that is sped up, and s by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import Interval, Sample, mean_interval, ratio

TOLERANCE = 0.10
Basis = Literal["prefix attention", "attention"]
Source = Literal["timed in the server", "derived from kernel records"]
_BASIS_COLUMN: dict[Basis, str] = {"prefix attention": "prefix_s", "attention": "attention_s"}


@dataclass(frozen=True)
class AmdahlCheck:
    """Predicted against measured for one path at one point; intervals are over launches.

    `basis` says whose share `share` is, `source` where it comes from, with `detail` and `record_ids` of the kernels if
    it is derived. `contradiction` is one sentence when the three cannot all be true.
    """

    path: str
    baseline: str
    basis: Basis
    share: Interval
    kernel_speedup: Interval
    predicted: Interval
    measured: Interval
    contradiction: str | None
    source: Source = "timed in the server"
    detail: str = ""
    record_ids: tuple[str, ...] = ()

    @property
    def is_derived(self) -> bool:
        return self.source != "timed in the server"

    @property
    def origin(self) -> str:
        return f"{self.source} {self.detail}".strip()


def speedup(share: float, kernel_speedup: float) -> float:
    return 1 / ((1 - share) + share / kernel_speedup)


def limit(share: float) -> float:
    """Speed-up with an infinitely fast kernel."""
    return math.inf if share >= 1 else 1 / (1 - share)


def required_share(end_to_end_speedup: float, kernel_speedup: float = math.inf) -> float:
    """The least share of the step that explains an end-to-end speed-up."""
    return (1 - 1 / end_to_end_speedup) / (1 - 1 / kernel_speedup)


def check(point: Point, path: str, baseline: str = "stock+plugin") -> AmdahlCheck | str:
    """Compares prediction and measurement at one point; a sentence instead when the timers were not on.

    The share comes from the baseline's attention time over its decode time, the kernel speed-up from both paths'
    attention time per step. Prefix attention alone is used where both paths timed it.
    """
    rows = {arm: point.of_arm(arm) for arm in (path, baseline)}
    for arm, found in rows.items():
        if found.empty:
            return f"{arm} was not measured at this point"
    basis = next((b for b in _BASIS_COLUMN if all(_timed(r, b) for r in rows.values())), None)
    if basis is None:
        return "attention was not timed: run with engine.timers=true"
    share = _per_launch(rows[baseline], _BASIS_COLUMN[basis], "decode_s")
    per_step = {arm: _per_launch(found, _BASIS_COLUMN[basis], "steps") for arm, found in rows.items()}
    common = sorted(share.keys() & per_step[path].keys())
    gains = {launch: per_step[baseline][launch] / per_step[path][launch] for launch in common}
    measured = ratio(point.sample(path), point.sample(baseline))
    share_interval = mean_interval(list(share.values()))
    predicted = mean_interval([speedup(share[launch], gains[launch]) for launch in common])
    return AmdahlCheck(
        path=path,
        baseline=baseline,
        basis=basis,
        share=share_interval,
        kernel_speedup=mean_interval(list(gains.values())),
        predicted=predicted,
        measured=measured,
        contradiction=contradiction(measured, share_interval, predicted),
    )


def contradiction(measured: Interval, share: Interval, predicted: Interval | None = None) -> str | None:
    """A sentence when the share cannot explain the measured speed-up, or prediction and measurement part ways."""
    if measured.estimate is None or share.estimate is None:
        return None
    if share.estimate >= 1:
        return f"attention alone would take {share.estimate:.0%} of the step"
    least = measured.low if measured.low is not None else measured.estimate
    most = share.high if share.high is not None else share.estimate
    if least > 1 and required_share(least) > most:
        return (
            f"{measured.estimate:.3g}x needs a share of at least {required_share(measured.estimate):.1%}, "
            f"the profile shows {share.estimate:.1%}"
        )
    if predicted is None or predicted.estimate is None:
        return None
    apart = abs(predicted.estimate / measured.estimate - 1)
    if apart > TOLERANCE and not _overlap(predicted, measured):
        return f"predicted {predicted.estimate:.3g}x, measured {measured.estimate:.3g}x: {apart:.0%} apart"
    return None


def _timed(rows: pd.DataFrame, basis: Basis) -> bool:
    return bool((rows[_BASIS_COLUMN[basis]] > 0).any() and (rows["decode_s"] > 0).any())


def _per_launch(rows: pd.DataFrame, column: str, per: str) -> Sample:
    values = zip(*(rows[name].tolist() for name in ("launch_id", column, per)), strict=True)
    return {launch: above / below for launch, above, below in values if above > 0 and below > 0}


def _overlap(a: Interval, b: Interval) -> bool:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high
