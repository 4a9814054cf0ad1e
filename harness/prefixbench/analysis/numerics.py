"""Is a path further from stock than stock at another batch size is from itself? Deviations, and a test of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixbench.analysis.quantity import SAMPLES_BEYOND
from prefixbench.case import NumericsCase
from prefixbench.record import NumericsMeasurement, Record

OUTSIDE = "numerics"
"""The kind of failure of a record that was measured, and found further from stock than stock's own noise."""
QUANTILES = (0.99, 0.999)
EXCHANGES = 499
SIGNIFICANCE = 0.01
# Beyond it chance is no excuse: one broken request among many is as likely on either side of an exchange.
LARGEST_RATIO = 3.0
# Rounding of the fp32 log-probabilities themselves: of size 8 to 16 (spacing 1e-6), after sums over a vocabulary.
FLOOR = 1e-5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Deviation:
    """|difference of log-probabilities| from the reference, over `positions`; a quantile is None when fewer than five
    positions lie beyond it. `other_argmax`: share of positions that would have said another token."""

    positions: int
    mean: float
    median: float
    quantiles: tuple[float | None, ...]
    largest: float
    other_argmax: float


@dataclass(frozen=True)
class Agreement:
    """One path beside stock's own noise, both against the same reference and over the same positions.

    `ratio`: the largest of path over noise among QUANTILES and maximum. `p_value`: how often one of these ratios is as
    large when path and noise are exchanged at random, request by request (the least of them, times their number).
    Inside: the ratio is not above one, or it is not rare and not above three.
    """

    noise: Deviation
    path: Deviation
    ratio: float
    p_value: float

    @property
    def inside(self) -> bool:
        return self.ratio <= 1.0 or (self.p_value > SIGNIFICANCE and self.ratio <= LARGEST_RATIO)


@dataclass(frozen=True)
class Verdict:
    """One record of role `path`: its agreement, or why there is none."""

    record: Record
    case: NumericsCase
    noise_concurrency: int | None
    agreement: Agreement | None
    why_not: str | None

    @property
    def is_control(self) -> bool:
        return is_control(self.record)

    @property
    def as_it_must_be(self) -> bool:
        """A path inside, or a control that was found out."""
        return self.agreement is not None and self.agreement.inside is not self.is_control

    @property
    def said(self) -> str:
        if self.agreement is None:
            return "not measured"
        if self.is_control:
            return "inside, though it must not be" if self.agreement.inside else "outside, as it must be"
        return "inside" if self.agreement.inside else "OUTSIDE"


def is_control(record: Record) -> bool:
    """Whether a fault was planted: such a record fails when all is well."""
    return isinstance(record.case, NumericsCase) and record.case.fault != "none"


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Every path of every launch, in the order of the records."""
    launches: defaultdict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if isinstance(record.case, NumericsCase) and record.case.role != "path":
            launches[record.launch.launch_id][record.case.role] = record
    return [
        _verdict(record, record.case, launches[record.launch.launch_id])
        for record in records
        if isinstance(record.case, NumericsCase) and record.case.role == "path"
    ]


def agreement(reference: NumericsMeasurement, noise: NumericsMeasurement, path: NumericsMeasurement) -> Agreement:
    """Judges one path; ValueError when the three did not decode the same tokens."""
    if len({reference.tokens_sha256, noise.tokens_sha256, path.tokens_sha256}) != 1:
        raise ValueError("reference, noise and path did not decode the same tokens")
    ours, stocks = _differences(reference, path), _differences(reference, noise)
    ratios = _ratios(ours, stocks)
    return Agreement(
        noise=_deviation(reference, noise, stocks),
        path=_deviation(reference, path, ours),
        ratio=float(ratios.max()),
        p_value=_p_value(ours, stocks, ratios),
    )


def _verdict(record: Record, case: NumericsCase, stock: dict[str, Record]) -> Verdict:
    noise = stock["noise"].case if "noise" in stock else None
    noise_concurrency = noise.concurrency if isinstance(noise, NumericsCase) else None
    measured: list[NumericsMeasurement] = []
    for role, of in (("reference", stock.get("reference")), ("noise", stock.get("noise")), ("path", record)):
        if of is None:
            why = f"the record of the {role} is not in this selection"
            return Verdict(record, case, noise_concurrency, None, why)
        if not isinstance(of.measurement, NumericsMeasurement) or (of.failure and of.failure.kind != OUTSIDE):
            why = of.failure.message if of.failure else f"the {role} was not measured"
            return Verdict(record, case, noise_concurrency, None, why)
        measured.append(of.measurement)
    return Verdict(record, case, noise_concurrency, agreement(*measured), None)


def _differences(reference: NumericsMeasurement, other: NumericsMeasurement) -> Floats:
    """[requests, tokens]"""
    return np.abs(np.asarray(other.logprobs, dtype=np.float64) - np.asarray(reference.logprobs, dtype=np.float64))


def _deviation(reference: NumericsMeasurement, other: NumericsMeasurement, differences: Floats) -> Deviation:
    ranks = _ranks(differences.size)
    ordered = np.sort(differences, axis=None)
    return Deviation(
        positions=differences.size,
        mean=float(differences.mean()),
        median=float(np.median(ordered)),
        quantiles=tuple(float(ordered[ranks[q]]) if q in ranks else None for q in QUANTILES),
        largest=float(ordered[-1]),
        other_argmax=float(np.mean(np.asarray(reference.argmax) != np.asarray(other.argmax))),
    )


def _ranks(positions: int) -> dict[float, int]:
    """Quantile -> index among the ordered values, for those with five positions beyond them."""
    return {q: int(np.ceil(q * positions)) - 1 for q in QUANTILES if positions * (1 - q) >= SAMPLES_BEYOND - 1e-9}


def _ratios(ours: Floats, stocks: Floats) -> Floats:
    """Path over noise: one for each quantile that there is, then the maximum."""
    kept = [*_ranks(ours.size).values(), ours.size - 1]
    ours, stocks = (np.maximum(np.partition(side, kept, axis=None)[kept], FLOOR) for side in (ours, stocks))
    return ours / stocks


def _p_value(ours: Floats, stocks: Floats, ratios: Floats) -> float:
    """Permutation tests whose units are requests: the positions of one request share a context, so they are not
    independent. Seeded, so that the same records always give the same verdict."""
    generator = np.random.default_rng(0)
    as_large = np.zeros(ratios.shape)
    for _ in range(EXCHANGES):
        swapped = generator.random((len(ours), 1)) < 0.5
        as_large += _ratios(np.where(swapped, stocks, ours), np.where(swapped, ours, stocks)) >= ratios
    rarest = float((1 + as_large.min()) / (1 + EXCHANGES))
    return min(1.0, rarest * ratios.size)
