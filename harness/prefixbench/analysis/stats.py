"""Intervals over launches: means, differences, ratios, and ratios of differences.

The replicate is the server launch. A `Sample` maps launch id to that launch's value, so samples that share launches
are paired without anybody having to say so. Ratios and shares use Fieller's interval (exact for normal launch values,
pairing included). A bootstrap over launches agrees with it where launches are many, and is too narrow with five.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
Sample = Mapping[str, float]

CONFIDENCE = 0.95
STABLE_HALF_WIDTH = 0.02
MOST_LAUNCHES = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate over `n` launches. `low`/`high`/`sd` are None when n is 1, and `note` says why or what to do."""

    estimate: float | None
    low: float | None
    high: float | None
    n: int
    sd: float | None
    method: str
    confidence: float = CONFIDENCE
    note: str | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def contains(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean with a Student interval, sd with n-1. One launch has no interval: never a width of 0."""
    n = len(values)
    if n == 0:
        return _no_launch("t", confidence)
    mean = float(np.mean(values))
    if n == 1:
        return Interval(mean, None, None, 1, None, "t", confidence, "one launch has no error bar")
    sd = float(np.std(values, ddof=1))
    half = _t(confidence, n - 1) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, sd, "t", confidence)


def spread_interval(*groups: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Coefficient of variation between launches (sd / mean), pooled over groups that have means of their own.

    The interval is the chi-square one of a standard deviation.
    """
    usable = [np.asarray(group, dtype=np.float64) for group in groups if len(group) > 1]
    n = sum(len(group) for group in groups)
    if not usable:
        return Interval(None, None, None, n, None, "chi2", confidence, "the spread of one launch is unknown")
    df = sum(len(group) - 1 for group in usable)
    spread = math.sqrt(sum((len(g) - 1) * (g.std(ddof=1) / g.mean()) ** 2 for g in usable) / df)
    tail = (1 - confidence) / 2
    low, high = (spread * math.sqrt(df / float(special.chdtri(df, p))) for p in (tail, 1 - tail))
    return Interval(spread, low, high, n, None, "chi2", confidence)


def difference(sample: Sample, baseline: Sample, confidence: float = CONFIDENCE) -> Interval:
    """sample - baseline; paired by launch where both were measured in the same launches, else Welch.

    Samples that share some launches but not all are compared on those that they share.
    """
    if not sample or not baseline:
        return _no_launch("t", confidence)
    contrast = _Contrast.of([sample, baseline], [1, -1], [0, 0])
    if not contrast.has_interval:
        return Interval(contrast.top, None, None, contrast.n, None, contrast.method("t"), confidence, _TOO_FEW)
    half = _t(confidence, contrast.df(0.0)) * math.sqrt(contrast.var_top)
    low, high = contrast.top - half, contrast.top + half
    sd = math.sqrt(contrast.var_top * contrast.n)
    return Interval(contrast.top, low, high, contrast.n, sd, contrast.method("t"), confidence)


def ratio(sample: Sample, baseline: Sample, confidence: float = CONFIDENCE) -> Interval:
    """sample / baseline with Fieller's interval."""
    return contrast_ratio([sample, baseline], [1, 0], [0, 1], confidence)


def contrast_ratio(
    samples: Sequence[Sample], top: Sequence[float], bottom: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """(sum top_i mean_i) / (sum bottom_i mean_i) with Fieller's interval; `top` and `bottom` weigh the samples.

    A denominator that cannot be told from 0 gives no estimate at all.
    """
    if not all(samples):
        return _no_launch("Fieller", confidence)
    contrast = _Contrast.of(samples, top, bottom)
    method = contrast.method("Fieller")
    if contrast.bottom == 0:
        return Interval(None, None, None, contrast.n, None, method, confidence, NO_DENOMINATOR)
    estimate = contrast.top / contrast.bottom
    if not contrast.has_interval:
        return Interval(estimate, None, None, contrast.n, None, method, confidence, _TOO_FEW)
    critical = _t(confidence, contrast.df(estimate))
    return _fieller(contrast, critical, method, confidence)


def contrast_ratio_known_errors(
    means: Sequence[float], standard_errors: Sequence[float], top: Sequence[float], bottom: Sequence[float]
) -> Interval:
    """The same ratio of published means whose standard errors are taken as known (normal quantile, no pairing)."""
    values, errors, a, b = (np.asarray(x, dtype=np.float64) for x in (means, standard_errors, top, bottom))
    weights = np.stack([a, b], axis=1)
    covariance = weights.T @ np.diag(errors**2) @ weights
    contrast = _Contrast(float(a @ values), float(b @ values), covariance, (), 0, paired=False)
    critical = -float(special.ndtri((1 - CONFIDENCE) / 2))
    return _fieller(contrast, critical, "Fieller, standard errors assumed", CONFIDENCE)


def launches_needed(sd: float, half_width: float, confidence: float = CONFIDENCE) -> int | None:
    """Launches after which a mean of this sd has an interval of +- half_width; None beyond ten thousand."""
    if sd == 0:
        return 2
    reached = _half_widths(confidence) * sd <= half_width
    return int(np.argmax(reached)) + 2 if reached.any() else None


def instability(values: Sequence[float], target: float = STABLE_HALF_WIDTH) -> str | None:
    """One line when the interval of the mean is wider than +- target (relative), with what to do; else None."""
    interval = mean_interval(values)
    if interval.estimate is None or interval.half_width is None or interval.sd is None:
        return "one launch has no error bar: run at least 2 more" if interval.n == 1 else None
    relative = interval.half_width / abs(interval.estimate)
    if relative <= target:
        return None
    needed = launches_needed(interval.sd, target * abs(interval.estimate))
    advice = f"about {needed - interval.n} more launches" if needed else "a quieter machine: launches alone will not do"
    return f"±{relative:.1%} after {interval.n} launches; ±{target:.0%} needs {advice}"


NO_DENOMINATOR = "the denominator is not distinguishable from 0"
_TOO_FEW = "an interval needs at least 2 launches of each"


@dataclass(frozen=True)
class _Contrast:
    """Means of numerator and denominator, the covariance of both, and the independent clusters they came from."""

    top: float
    bottom: float
    covariance: Array
    clusters: tuple[Array, ...]
    n: int
    paired: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], top: Sequence[float], bottom: Sequence[float]) -> _Contrast:
        clusters = _clusters(samples, top, bottom)
        means = np.sum([c.mean(axis=0) for c in clusters], axis=0)
        covariance = np.sum([np.cov(c, rowvar=False) / len(c) if len(c) > 1 else np.zeros((2, 2)) for c in clusters], 0)
        n = min(len(c) for c in clusters)
        return cls(float(means[0]), float(means[1]), covariance, tuple(clusters), n, paired=len(clusters) == 1)

    @property
    def has_interval(self) -> bool:
        return self.n >= 2

    @property
    def var_top(self) -> float:
        return float(self.covariance[0, 0])

    def df(self, theta: float) -> float:
        """Welch-Satterthwaite for top - theta x bottom; n - 1 when everything is paired."""
        variances = np.array([np.var(c[:, 0] - theta * c[:, 1], ddof=1) / len(c) for c in self.clusters])
        if variances.sum() == 0:
            return float(self.n - 1)
        spread = sum(v**2 / (len(c) - 1) for v, c in zip(variances, self.clusters, strict=True))
        return float(variances.sum() ** 2 / spread)

    def method(self, name: str) -> str:
        return f"{name}, paired by launch" if self.paired else f"{name}, unpaired"


def _clusters(samples: Sequence[Sample], top: Sequence[float], bottom: Sequence[float]) -> list[Array]:
    """Per independent group of samples: one row (numerator part, denominator part) for each launch."""
    groups: list[list[int]] = []
    for index, sample in enumerate(samples):
        if top[index] == 0 and bottom[index] == 0:
            continue
        home = next((g for g in groups if len(_common(samples, [*g, index])) >= min(2, len(sample))), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    clusters = []
    for group in groups:
        values = np.array([[samples[i][launch] for i in group] for launch in _common(samples, group)])
        weights = np.array([[top[i], bottom[i]] for i in group], dtype=np.float64)
        clusters.append(values @ weights)
    return clusters


def _common(samples: Sequence[Sample], group: Sequence[int]) -> list[str]:
    return sorted(set.intersection(*(set(samples[i]) for i in group)))


def _fieller(contrast: _Contrast, critical: float, method: str, confidence: float) -> Interval:
    """Roots theta of (top - theta bottom)^2 = critical^2 var(top - theta bottom)."""
    (vt, c), (_, vb) = contrast.covariance.tolist()
    limit = critical**2
    a, b = contrast.bottom**2 - limit * vb, contrast.top * contrast.bottom - limit * c
    if a <= 0:
        return Interval(None, None, None, contrast.n, None, method, confidence, NO_DENOMINATOR)
    root = math.sqrt(max(0.0, b * b - a * (contrast.top**2 - limit * vt)))
    estimate = contrast.top / contrast.bottom
    variance = max(0.0, vt - 2 * estimate * c + estimate**2 * vb) / contrast.bottom**2
    sd = math.sqrt(variance * contrast.n) if contrast.n else None
    return Interval(estimate, (b - root) / a, (b + root) / a, contrast.n, sd, method, confidence)


def _no_launch(method: str, confidence: float) -> Interval:
    return Interval(None, None, None, 0, None, method, confidence, "no launch")


@lru_cache
def _half_widths(confidence: float) -> Array:
    """Half width of the interval of a mean in standard deviations, for 2, 3, ... launches."""
    n = np.arange(2, MOST_LAUNCHES)
    return np.asarray(-special.stdtrit(n - 1, (1 - confidence) / 2) / np.sqrt(n), dtype=np.float64)


@lru_cache(maxsize=4096)
def _t(confidence: float, df: float) -> float:
    return -float(special.stdtrit(df, (1 - confidence) / 2))
