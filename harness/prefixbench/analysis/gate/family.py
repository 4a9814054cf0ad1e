"""The gate's statistics, vectorised: the same functions judge one comparison and a hundred thousand simulated ones.

Arrays are [..., metrics] (launches last where there are any). An effect is a difference of mean logarithms, oriented
so that negative means worse.

Three choices make five launches enough (measured by `gate --self-test`):
- Arms are compared by the pooled two-sample t with twice the degrees of freedom of a paired one, unless the metrics
  together show that pairing pays (mean correlation over 0.3). Ignoring a positive correlation only widens intervals.
- Variances are moderated across metrics (empirical Bayes: Smyth 2004, doi 10.2202/1544-6115.1027); a metric much
  noisier than the rest keeps its own (the robust form: Phipson et al. 2016, doi 10.1214/16-AOAS920), and so does the
  primary metric, whose noise is nobody else's.
- The error rate is controlled over all metrics by Holm's procedure; one primary metric may hold most of it, and hands
  its part on when it is rejected (fallback: Wiens 2003, doi 10.1002/pst.64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PAIRING_PAYS = 0.3
FEWEST_TO_MODERATE = 4
NOISIER_THAN_THE_REST = 0.02
NOISE_FREE = 1e-14  # the log variance of a counter, which does not speak for the noise of timings
MOST_LAUNCHES = 500


@dataclass(frozen=True)
class Rule:
    """When a comparison is red and when it passes. All magnitudes are relative (0.01 is 1%).

    `alpha` is the chance, over all metrics together, of red on identical code. Red needs a regression of at least
    `min_magnitude` beside confidence; a pass needs every regression beyond `margin` excluded at `pass_confidence`.
    `primary_weight` is the part of `alpha` that a primary metric holds.
    """

    alpha: float = 0.025
    min_magnitude: float = 0.01
    margin: float = 0.05
    primary_weight: float = 0.6
    pass_confidence: float = 0.95
    min_launches: int = 3


@dataclass(frozen=True)
class Effects:
    """Log effects [..., metrics], the variance of one launch (or pair), its df, and standard error / sqrt(variance)."""

    effect: Array
    variance: Array
    df: Array
    scale: Array

    @property
    def standard_error(self) -> Array:
        return np.asarray(self.scale * np.sqrt(self.variance))


@dataclass(frozen=True)
class Verdicts:
    """Per metric: adjusted p of a regression, and whether it is red, excluded beyond the margin, or an improvement."""

    p: Array
    red: Bools
    excluded: Bools
    improved: Bools
    low: Array
    high: Array


def compare(
    baseline: Array, candidate: Array, rule: Rule, *, primary: int | None, interleaved: bool, families: int = 1
) -> tuple[Effects, Verdicts]:
    """Effects and verdicts of oriented log values [..., metrics, launches] of two arms."""
    paired = pairing_pays(baseline, candidate) if interleaved else False
    found = effects(baseline, candidate, paired=paired)
    if baseline.shape[-1] == candidate.shape[-1]:
        found = moderate(found, primary)
    return found, judge(found, rule, primary, families)


def effects(baseline: Array, candidate: Array, *, paired: Bools | bool) -> Effects:
    """Effects of log values [..., metrics, launches]; `paired` may differ between comparisons (leading axes)."""
    n_b, n_c = baseline.shape[-1], candidate.shape[-1]
    effect = candidate.mean(axis=-1) - baseline.mean(axis=-1)
    var_b, var_c = baseline.var(axis=-1, ddof=1), candidate.var(axis=-1, ddof=1)
    if n_b == n_c:
        variance, df, scale = (var_b + var_c) / 2, np.full(effect.shape, 2.0 * (n_b - 1)), math.sqrt(2 / n_b)
        pair_variance = (candidate - baseline).var(axis=-1, ddof=1)
        chosen = np.broadcast_to(np.asarray(paired)[..., None], effect.shape)
        variance = np.where(chosen, pair_variance / 2, variance)
        df = np.where(chosen, n_b - 1.0, df)
    else:
        # Welch's error with the fewest degrees of freedom: Satterthwaite's estimate is too bold far out in the tail.
        scale, df = math.sqrt(1 / n_b + 1 / n_c), np.full(effect.shape, min(n_b, n_c) - 1.0)
        variance = (var_b / n_b + var_c / n_c) / scale**2
    return Effects(effect, variance, df, np.full(effect.shape, scale))


def pairing_pays(baseline: Array, candidate: Array) -> Bools:
    """Per comparison [...]: do the arms of interleaved launches move together, over all metrics [..., metrics, n]?"""
    if baseline.shape[-1] != candidate.shape[-1] or baseline.shape[-1] < 3:
        return np.zeros(baseline.shape[:-2], dtype=np.bool_)
    b, c = (x - x.mean(axis=-1, keepdims=True) for x in (baseline, candidate))
    norm = np.sqrt((b**2).sum(axis=-1) * (c**2).sum(axis=-1))
    correlation = (b * c).sum(axis=-1) / np.where(norm > 0, norm, 1.0)
    by_chance = 1 / math.sqrt(baseline.shape[-2] * (baseline.shape[-1] - 1))
    return np.asarray(correlation.mean(axis=-1) > max(PAIRING_PAYS, by_chance))


def moderate(found: Effects, primary: int | None = None) -> Effects:
    """Variances shrunk towards what the metrics have in common, as far as they have anything in common.

    For balanced arms only: elsewhere the degrees of freedom are a bound, not what the variance was estimated with.
    """
    d, variance = found.df, found.variance
    noisy = variance > NOISE_FREE
    count = noisy.sum(axis=-1)
    if found.effect.shape[-1] < FEWEST_TO_MODERATE:
        return found
    e = np.where(noisy, np.log(np.maximum(variance, NOISE_FREE)) - special.digamma(d / 2) + np.log(d / 2), 0.0)
    mean = e.sum(axis=-1) / np.maximum(count, 1)
    spread = (np.where(noisy, e - mean[..., None], 0.0) ** 2).sum(axis=-1) / np.maximum(count - 1, 1)
    excess = spread - special.polygamma(1, d / 2).mean(axis=-1)
    most = d.sum(axis=-1)
    d0 = np.where(excess > 0, 2 * _trigamma_inverse(np.maximum(excess, 1e-9)), np.inf)
    d0 = np.minimum(d0, most)[..., None]
    prior = np.exp(mean[..., None] + special.digamma(d0 / 2) - np.log(d0 / 2))
    own = np.asarray(special.fdtrc(d, d0, variance / prior) < NOISIER_THAN_THE_REST) | ~noisy
    own |= (count < FEWEST_TO_MODERATE)[..., None]
    if primary is not None:
        own[..., primary] = True
    shrunk = (d0 * prior + d * variance) / (d0 + d)
    return Effects(
        effect=found.effect,
        variance=np.where(own, variance, shrunk),
        df=np.where(own, d, np.minimum(d0 + d, most[..., None])),
        scale=found.scale,
    )


def judge(found: Effects, rule: Rule, primary: int | None = None, families: int = 1) -> Verdicts:
    """Judges all metrics of each comparison; `families` comparisons (rolling, anchored) share `alpha` evenly."""
    error = np.maximum(found.standard_error, 1e-15)
    statistic = found.effect / error
    p = _adjusted(np.asarray(special.stdtr(found.df, statistic)), rule, primary, families)
    p_better = _adjusted(np.asarray(special.stdtr(found.df, -statistic)), rule, primary, families)
    reach = special.stdtrit(found.df, rule.pass_confidence) * error
    worst = math.log1p(-rule.margin)
    return Verdicts(
        p=p,
        red=(p <= rule.alpha) & (found.effect <= math.log1p(-rule.min_magnitude)),
        excluded=found.effect - reach > worst,
        improved=(p_better <= rule.alpha) & (found.effect > -worst),
        low=found.effect - reach,
        high=found.effect + reach,
    )


def launches_to_decide(effect: float, sd: float, n: int, rule: Rule, alpha: float) -> int | None:
    """More launches per arm after which this effect, if it stays, is red at `alpha` or excluded; None beyond 500."""
    total = np.arange(n + 1, MOST_LAUNCHES)
    df, error = 2.0 * (total - 1), sd * np.sqrt(2 / total)
    passes = effect - special.stdtrit(df, rule.pass_confidence) * error > math.log1p(-rule.margin)
    fails = (effect <= math.log1p(-rule.min_magnitude)) & (effect - special.stdtrit(df, alpha) * error <= 0)
    decided = passes | fails
    return int(total[np.argmax(decided)]) - n if decided.any() else None


def _adjusted(p: Array, rule: Rule, primary: int | None, families: int) -> Array:
    """Holm-adjusted p over the last axis, so that comparing with `alpha` controls the whole family."""
    if primary is None:
        return np.minimum(1.0, families * _holm(p))
    first = families * p[..., primary] / rule.primary_weight
    others = np.delete(p, primary, axis=-1)
    part = np.where(first <= rule.alpha, 1.0, 1 - rule.primary_weight)[..., None]
    adjusted = families * _holm(others) / part if others.shape[-1] else others
    return np.asarray(np.minimum(1.0, np.insert(adjusted, primary, first, axis=-1)))


def _holm(p: Array) -> Array:
    order = np.argsort(p, axis=-1)
    stepped = np.take_along_axis(p, order, axis=-1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(stepped, axis=-1), axis=-1)
    return adjusted


def _trigamma_inverse(y: Array) -> Array:
    """Newton's iteration on 1/trigamma, which is nearly linear (Smyth 2004, appendix)."""
    x = 0.5 + 1 / y
    for _ in range(8):
        tri = special.polygamma(1, x)
        x = x + tri * (1 - tri / y) / special.polygamma(2, x)
    return np.asarray(x)
