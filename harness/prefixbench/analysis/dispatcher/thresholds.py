"""From how many queries on one path beats another, with an interval: cells resampled, the threshold found again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixbench.analysis.dispatcher.timed_cells import TimedCell
from prefixbench.analysis.stats import CONFIDENCE, Interval
from prefixonce.step import Path

Array = npt.NDArray[np.float64]

RESAMPLES = 2000
_SEED = 1


def dense_threshold(cells: Sequence[TimedCell]) -> Interval | None:
    """M_eff from which dense is the better choice than cascade; None where both were never timed together."""
    both = [cell for cell in cells if {Path.CASCADE, Path.DENSE} <= set(cell.us)]
    return _threshold(both, [math.log(cell.us[Path.DENSE] / cell.us[Path.CASCADE]) for cell in both])


def sharing_thresholds(cells: Sequence[TimedCell]) -> dict[int, Interval]:
    """By prefix length: M_eff from which reading once, by the better kernel, is the better choice than stock."""
    found = {}
    for prefix in sorted({cell.layer.prefix_tokens for cell in cells}):
        own = [cell for cell in cells if cell.is_complete and cell.layer.prefix_tokens == prefix]
        shared = [min(cell.us[Path.CASCADE], cell.us[Path.DENSE]) for cell in own]
        gains = [math.log(us / cell.us[Path.STOCK]) for us, cell in zip(shared, own, strict=True)]
        interval = _threshold(own, gains)
        if interval is not None:
            found[prefix] = interval
    return found


def _threshold(cells: Sequence[TimedCell], log_ratios: Sequence[float]) -> Interval | None:
    """`log_ratios`: log of the time with the path in question over the time without it, cell by cell."""
    if len({cell.m_eff for cell in cells}) < 2:
        return None
    m_eff, gain = np.array([cell.m_eff for cell in cells], float), np.array(log_ratios)
    drawn = np.random.default_rng(_SEED).integers(len(cells), size=(RESAMPLES, len(cells)))
    again = [best_threshold(m_eff[index], gain[index]) for index in drawn]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(again, [tail, 1 - tail], method="inverted_cdf")
    note = "bootstrap over cells; infinity: it never pays where it was timed"
    return Interval(best_threshold(m_eff, gain), float(low), float(high), len(cells), None, "bootstrap", note=note)


def best_threshold(m_eff: Array, log_ratios: Array) -> float:
    """The M_eff from which on taking the path costs least: smallest sum of relative times; infinity if never."""
    candidates, place = np.unique(m_eff, return_inverse=True)
    by_candidate = np.bincount(place, weights=log_ratios, minlength=len(candidates))
    from_here_on = np.append(np.cumsum(by_candidate[::-1])[::-1], 0.0)
    # The largest of equally good ones: nothing is gained before it.
    best = len(candidates) - int(np.argmin(from_here_on[::-1]))
    return math.inf if best == len(candidates) else float(candidates[best])
