"""Who gets the credit: each path's share of the gain over stock, in three yardsticks, and the Shapley split beside it.

A ladder (stock, cascade, full, auto) credits each rung with what it adds to the rung below, so shares depend on the
order; the Shapley value averages over every order whose combinations were measured. Nobody is credited for a path
that did not run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from prefixbench.analysis.stats import (
    NO_DENOMINATOR,
    Interval,
    Sample,
    contrast_ratio,
    contrast_ratio_known_errors,
    difference,
)

Yardstick = Literal["throughput", "time per token", "log"]
YARDSTICKS: dict[Yardstick, Callable[[float], float]] = {
    "throughput": float,
    "time per token": lambda tok_s: 1 / tok_s,
    "log": math.log,
}
MIN_ACTIVE_SHARE = 0.5

# What must have served the steps for a run to count as that path, and the kernel that its rung is about.
RUNS_AS: dict[str, frozenset[str]] = {
    "paged": frozenset({"paged"}),
    "cascade": frozenset({"cascade"}),
    "dense": frozenset({"dense"}),
    "full": frozenset({"cascade", "dense"}),
}
CREDITS: dict[str, frozenset[str]] = {**RUNS_AS, "full": frozenset({"dense"})}

# Ingredients of each path, for the Shapley split.
INGREDIENTS: dict[str, frozenset[str]] = {
    "stock": frozenset(),
    "cascade": frozenset({"read once"}),
    "dense": frozenset({"contiguous + dense"}),
    "full": frozenset({"read once", "contiguous + dense"}),
    "auto": frozenset({"read once", "contiguous + dense", "cost model"}),
}


@dataclass(frozen=True)
class Rung:
    """One path of a ladder: tok/s per launch, and the share of decode steps each kernel really served (if known)."""

    path: str
    tok_s: Sample
    step_shares: Mapping[str, float] | None = None

    def share_of(self, kernels: Mapping[str, frozenset[str]]) -> float | None:
        wanted = kernels.get(self.path)
        if wanted is None or self.step_shares is None:
            return None
        return sum(share for kernel, share in self.step_shares.items() if kernel in wanted)


@dataclass(frozen=True)
class Share:
    """What `path` added to `below`, as a share of the whole gain. `share.note` says why there is none."""

    path: str
    below: str
    share: Interval
    active_share: float | None


@dataclass(frozen=True)
class Attribution:
    """Shares of one ladder in one yardstick; they sum to 1 where all exist. `refusal` says why there is none at all."""

    yardstick: Yardstick
    baseline: str
    top: str
    gain: Interval
    shares: tuple[Share, ...]
    refusal: str | None


@dataclass(frozen=True)
class ShapleySplit:
    """Mean share of each ingredient over the orders whose every combination was measured."""

    shares: dict[str, float]
    orders_used: int
    orders_possible: int
    note: str


def attribute(
    rungs: Sequence[Rung], yardstick: Yardstick = "throughput", min_active_share: float = MIN_ACTIVE_SHARE
) -> Attribution:
    """Splits the gain of the last rung over the first among the rungs between, with Fieller intervals."""
    scale = YARDSTICKS[yardstick]
    samples = [{launch: scale(value) for launch, value in rung.tok_s.items()} for rung in rungs]
    gain = difference(samples[-1], samples[0])
    inactive = [_inactive(rung, RUNS_AS, min_active_share) for rung in rungs]
    uncredited = [_inactive(rung, CREDITS, min_active_share) for rung in rungs]
    shares = []
    for index in range(1, len(rungs)):
        refusal = inactive[-1] or inactive[index - 1] or uncredited[index]
        share = _no_share(gain, refusal) if refusal else _share(samples, index, rungs)
        shares.append(Share(rungs[index].path, rungs[index - 1].path, share, rungs[index].share_of(CREDITS)))
    return Attribution(yardstick, rungs[0].path, rungs[-1].path, gain, tuple(shares), _common_refusal(shares))


def attribute_reported(
    tok_s: Mapping[str, float], yardstick: Yardstick = "throughput", cv: float | None = None, n: int = 1
) -> Attribution:
    """The same split of published means; with `cv` the interval that this spread over `n` launches would give."""
    plain = attribute([Rung(path, {"reported": value}) for path, value in tok_s.items()], yardstick)
    if cv is None:
        return plain
    values = [YARDSTICKS[yardstick](value) for value in tok_s.values()]
    errors = [(cv if yardstick == "log" else cv * value) / math.sqrt(n) for value in values]
    reported = list(tok_s.values())
    shares = []
    for index, share in enumerate(plain.shares, start=1):
        interval = contrast_ratio_known_errors(values, errors, *_weights(index, len(values)))
        shares.append(replace(share, share=_explain(interval, is_faster=reported[-1] > reported[0])))
    return replace(plain, shares=tuple(shares), refusal=_common_refusal(shares))


def shapley(tok_s: Mapping[str, Sample], yardstick: Yardstick = "throughput") -> ShapleySplit | None:
    """Averages each ingredient's added gain over all measured orders; None when no order or no gain was measured."""
    scale = YARDSTICKS[yardstick]
    value = {
        INGREDIENTS[path]: float(np.mean([scale(v) for v in sample.values()]))
        for path, sample in tok_s.items()
        if path in INGREDIENTS and sample
    }
    if frozenset() not in value or len(value) < 2:
        return None
    everything = max(value, key=len)
    orders = list(itertools.permutations(sorted(everything)))
    chains = [[frozenset(order[:size]) for size in range(len(order) + 1)] for order in orders]
    measured = [(order, chain) for order, chain in zip(orders, chains, strict=True) if all(c in value for c in chain)]
    gain = value[everything] - value[frozenset()]
    if not measured or gain == 0:
        return None
    added = dict.fromkeys(sorted(everything), 0.0)
    for order, chain in measured:
        for name, before, after in zip(order, chain, chain[1:], strict=False):
            added[name] += (value[after] - value[before]) / gain / len(measured)
    note = (
        "every order was measured: the split does not depend on the order"
        if len(measured) == len(orders)
        else f"{len(measured)} of {len(orders)} orders were measured; the rest would need other combinations of paths"
    )
    return ShapleySplit(added, len(measured), len(orders), note)


def _share(samples: Sequence[Sample], index: int, rungs: Sequence[Rung]) -> Interval:
    means = [float(np.mean(list(rung.tok_s.values()))) for rung in (rungs[0], rungs[-1])]
    interval = contrast_ratio(samples, *_weights(index, len(samples)))
    return _explain(interval, is_faster=means[1] > means[0])


def _weights(index: int, count: int) -> tuple[list[float], list[float]]:
    top, bottom = [0.0] * count, [0.0] * count
    top[index], top[index - 1] = 1.0, -1.0
    bottom[-1], bottom[0] = 1.0, -1.0
    return top, bottom


def _explain(interval: Interval, *, is_faster: bool) -> Interval:
    """Turns a missing denominator or a loss into a sentence instead of a share."""
    if interval.note == NO_DENOMINATOR:
        return _without(interval, "gain not distinguishable from 0, no share")
    return interval if is_faster else _without(interval, "no gain to split")


def _common_refusal(shares: Sequence[Share]) -> str | None:
    return shares[0].share.note if all(share.share.estimate is None for share in shares) else None


def _without(interval: Interval, note: str) -> Interval:
    return replace(interval, estimate=None, low=None, high=None, sd=None, note=note)


def _no_share(gain: Interval, note: str) -> Interval:
    return Interval(None, None, None, gain.n, None, "none", gain.confidence, note)


def _inactive(rung: Rung, kernels: Mapping[str, frozenset[str]], needed: float) -> str | None:
    share = rung.share_of(kernels)
    if share is None or share >= needed:
        return None
    names = " or ".join(sorted(kernels[rung.path]))
    return f"{rung.path}: {names} active on {share:.0%} of steps, credit needs {needed:.0%}"
