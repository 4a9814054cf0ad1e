"""The gate's own test: its error rates on simulated comparisons, and on real records of unchanged code.

Everything goes through `family.compare`, the function that judges real comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from prefixbench.analysis.gate.arms import by_case, compare_case, primary_arm
from prefixbench.analysis.gate.family import Rule, compare
from prefixbench.analysis.gate.judge import GateConfig
from prefixbench.record import Record

DRAWS = 4000
MOST_RED = 0.05  # of comparisons of unchanged code: 5 in 100
LEAST_CAUGHT = 0.95
Plant = Literal["nothing", "primary", "one other", "everything"]

MIXED = tuple(0.01 + 0.04 * i / 19 for i in range(20))
QUIET = (0.01,) * 20
NOISY = (0.05,) * 20


@dataclass(frozen=True)
class Scenario:
    """Metrics with these coefficients of variation between launches; metric 0 is the primary one if there is one.

    `drift` is a spread that both launches of a pair share; `size` the planted relative change of `plant`.
    """

    name: str
    cvs: tuple[float, ...] = MIXED
    launches: tuple[int, int] = (5, 5)
    plant: Plant = "nothing"
    size: float = 0.0
    has_primary: bool = True
    drift: float = 0.0
    at_most: float | None = None
    at_least: float | None = None


UNCHANGED = (
    Scenario("unchanged, CV 1 to 5%", at_most=MOST_RED),
    Scenario("unchanged, CV 1 to 5%, no primary metric", has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, CV 1 to 5%, 3 launches", launches=(3, 3), has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, CV 1 to 5%, 10 launches", launches=(10, 10), at_most=MOST_RED),
    Scenario("unchanged, CV 1 to 5%, 20 against 5 launches", launches=(20, 5), has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, CV 1 to 5%, 3% drift that pairs share", drift=0.03, at_most=MOST_RED),
    Scenario("unchanged, CV 1%, no primary metric", QUIET, has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, CV 5%", NOISY, at_most=MOST_RED),
    Scenario("unchanged, CV 1% but one at 5%", (*QUIET[1:], 0.05), has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, half at CV 1%, half at 5%", QUIET[:10] + NOISY[:10], has_primary=False, at_most=MOST_RED),
    Scenario("unchanged, one metric alone, CV 5%", NOISY[:1], at_most=MOST_RED),
)
SLOWER = (
    Scenario("-3% in the primary at CV 1%, others 1 to 5%", plant="primary", size=-0.03, at_least=LEAST_CAUGHT),
    Scenario("-3% in everything at CV 1%", QUIET, plant="everything", size=-0.03, at_least=LEAST_CAUGHT),
    Scenario("-3% in the only metric, CV 1%", QUIET[:1], plant="primary", size=-0.03, at_least=LEAST_CAUGHT),
    Scenario("-3% in the primary at CV 1%, 3% drift that pairs share", plant="primary", size=-0.03, drift=0.03),
    Scenario("the same with 7 pairs", launches=(7, 7), plant="primary", size=-0.03, drift=0.03, at_least=LEAST_CAUGHT),
    Scenario("-3% in one other metric, all at CV 1%", QUIET, plant="one other", size=-0.03),
    Scenario("-3% in one of 20 at CV 1%, no primary", QUIET, plant="one other", size=-0.03, has_primary=False),
    Scenario("-3% in one other metric at CV 3%", plant="one other", size=-0.03),
    Scenario("-50% in the primary at CV 5%", NOISY, plant="primary", size=-0.5, at_least=1.0),
    Scenario("-50% in one other metric at CV 5%", NOISY, plant="one other", size=-0.5, at_least=1.0),
    Scenario("-50% in one other metric, CV 1 to 5%", plant="one other", size=-0.5, at_least=1.0),
)
SCENARIOS = UNCHANGED + SLOWER


@dataclass(frozen=True)
class Rate:
    """How often a scenario was red, of how many comparisons, with a Clopper-Pearson 95% interval."""

    name: str
    red: float
    low: float
    high: float
    comparisons: int
    at_most: float | None
    at_least: float | None

    @property
    def ok(self) -> bool:
        """Within its bound; a scenario without a bound only informs."""
        return (self.at_most is None or self.red <= self.at_most) and (
            self.at_least is None or self.red >= self.at_least
        )


def simulate(scenario: Scenario, rule: Rule, draws: int = DRAWS, seed: int = 0) -> Rate:
    """Red rate of one scenario; for a planted change, of the metric that has it (any metric if all have)."""
    rng = np.random.default_rng(seed)
    spread = np.array(scenario.cvs)[:, None]
    arms = [rng.standard_normal((draws, len(scenario.cvs), n)) * spread for n in scenario.launches]
    if scenario.drift:
        shared = rng.standard_normal((draws, 1, scenario.launches[0])) * scenario.drift
        arms = [arm + shared for arm in arms]
    where = {"primary": [0], "one other": [len(scenario.cvs) // 2], "everything": [*range(len(scenario.cvs))]}
    planted = where.get(scenario.plant, [])
    arms[1][:, planted] += np.log1p(scenario.size)
    primary = 0 if scenario.has_primary else None
    baseline, candidate = arms
    _, verdicts = compare(baseline, candidate, rule, primary=primary, interleaved=True)
    red = verdicts.red[:, planted] if planted else verdicts.red
    return _rate(scenario.name, int(red.any(axis=-1).sum()), draws, scenario.at_most, scenario.at_least)


def self_test(rule: Rule, draws: int = DRAWS, seed: int = 0) -> list[Rate]:
    """Every scenario; 22 x 4,000 comparisons of 20 metrics take well under two minutes on two cores."""
    return [simulate(scenario, rule, draws, seed + i) for i, scenario in enumerate(SCENARIOS)]


def replay(records: Sequence[Record], config: GateConfig, draws: int = DRAWS, seed: int = 0) -> list[Rate]:
    """Error rates on real launches of unchanged code: random halves against each other, then with a change planted.

    Needs twice the rule's launches of every case; empty when there are fewer.
    """
    arms = [
        arm
        for case in by_case(records).values()
        for arm in compare_case(case, case, config.metrics, config.exclude).arms
    ]
    primary = primary_arm(arms, config.primary)
    family = [arm for arm in (primary, *(a for a in arms if a is not primary)) if arm is not None]
    count = min((len(arm.baseline) for arm in family), default=0)
    half = count // 2
    if half < config.rule.min_launches:
        return []
    values = np.stack([arm.baseline[:count] for arm in family])
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.tile(np.arange(count), (draws, 1)), axis=1)
    baseline, candidate = (values[:, orders[:, part]].swapaxes(0, 1) for part in (slice(half), slice(half, 2 * half)))
    index = None if primary is None else 0
    rates = []
    for name, size, at_most, at_least in _REPLAYED:
        changed = candidate + np.log1p(size)
        _, verdicts = compare(baseline, changed, config.rule, primary=index, interleaved=False)
        rates.append(_rate(name, int(verdicts.red.any(axis=-1).sum()), draws, at_most, at_least))
    return rates


_REPLAYED: tuple[tuple[str, float, float | None, float | None], ...] = (
    ("real launches, random halves", 0.0, MOST_RED, None),
    ("real launches, -3% planted in one half", -0.03, None, None),
    ("real launches, -50% planted in one half", -0.5, None, 1.0),
)


def _rate(name: str, red: int, of: int, at_most: float | None, at_least: float | None) -> Rate:
    """With the exact interval of a proportion (Clopper and Pearson 1934)."""
    low = float(special.betaincinv(red, of - red + 1, 0.025)) if red else 0.0
    high = float(special.betaincinv(red + 1, of - red, 0.975)) if red < of else 1.0
    return Rate(name, red / of, low, high, of, at_most, at_least)
