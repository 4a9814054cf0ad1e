"""Does somebody else's client see what ours sees? The same figures from both, block by block, on the same server.

The unit is the pair of blocks, one of each client, not the launch: what is asked is about clients, and both measured
the same server. They agree when the whole interval of the ratio lies within the tolerance; a wide interval is no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from prefixbench.analysis.stats import Interval, mean_interval, ratio
from prefixbench.case import OutsideCase
from prefixbench.record import Block, OutsideBlock, OutsideMeasurement, OutsidePair, Record

Verdict = Literal["agree", "differ", "undecided"]
TOLERANCE = 0.05


@dataclass(frozen=True)
class Agreement:
    """One figure of one case by both clients; `ratio` is theirs over ours."""

    case: OutsideCase
    figure: str
    ours: float
    theirs: float
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True)
class SpeedUp:
    """A path over stock without the plugin, in output tok/s, as each client measured it."""

    case: OutsideCase
    ours: Interval
    theirs: Interval


@dataclass(frozen=True)
class Measured:
    """All pairs of one case, its launches put together."""

    case: OutsideCase
    pairs: tuple[OutsidePair, ...]

    def tok_s(self, label: str) -> tuple[dict[str, float], dict[str, float]]:
        """Of our client and of theirs; keyed so that values of two cases with different labels are not paired."""
        ours = {f"{label} {i}": tok_s(pair.ours) for i, pair in enumerate(self.pairs)}
        return ours, {f"{label} {i}": outside_tok_s(pair.theirs) for i, pair in enumerate(self.pairs)}


def agreements(records: Sequence[Record], tolerance: float = TOLERANCE) -> list[Agreement]:
    """Two figures of every case: output tok/s over the whole block, and milliseconds per output token."""
    return [
        _agreement(measured, name, ours, theirs, tolerance)
        for measured in by_case(records)
        for name, ours, theirs in (
            ("output tok/s", tok_s, outside_tok_s),
            ("ms per output token", tpot_ms, outside_tpot_ms),
        )
    ]


def speed_ups(records: Sequence[Record]) -> list[SpeedUp]:
    """Every path with the plugin against stock without it, where both were measured at the same sizes."""
    cases = by_case(records)
    stock = {_sizes(measured.case): measured.tok_s("stock") for measured in cases if not measured.case.serving.plugin}
    found = []
    for measured in cases:
        baseline = stock.get(_sizes(measured.case))
        if measured.case.serving.plugin and baseline is not None:
            ours, theirs = measured.tok_s("path")
            found.append(SpeedUp(measured.case, ratio(ours, baseline[0]), ratio(theirs, baseline[1])))
    return found


def by_case(records: Sequence[Record]) -> list[Measured]:
    cases: dict[str, OutsideCase] = {}
    pairs: dict[str, list[OutsidePair]] = {}
    for record in records:
        if isinstance(record.case, OutsideCase) and isinstance(record.measurement, OutsideMeasurement):
            cases[record.case_hash] = record.case
            pairs.setdefault(record.case_hash, []).extend(record.measurement.pairs)
    return [Measured(cases[key], tuple(found)) for key, found in pairs.items()]


def judge(ratios: Interval, tolerance: float) -> Verdict:
    if ratios.low is None or ratios.high is None:
        return "undecided"
    if ratios.low > 1 + tolerance or ratios.high < 1 - tolerance:
        return "differ"
    return "agree" if 1 - tolerance <= ratios.low and ratios.high <= 1 + tolerance else "undecided"


def tok_s(block: Block) -> float:
    return sum(sample.output_tokens for sample in block.requests) / block.wall_s


def tpot_ms(block: Block) -> float:
    """Mean over requests of the time from first to last chunk, per token in between; as the other client defines it."""
    spans = [(sample.chunks[0], sample.chunks[-1]) for sample in block.requests if len(sample.chunks) > 1]
    return 1e3 * mean((end_s - begin_s) / (last - first) for (first, begin_s), (last, end_s) in spans)


def outside_tok_s(block: OutsideBlock) -> float:
    return sum(block.output_tokens) / block.wall_s


def outside_tpot_ms(block: OutsideBlock) -> float:
    pairs = zip(block.decode_s, block.output_tokens, strict=True)
    return 1e3 * mean(seconds / (tokens - 1) for seconds, tokens in pairs if tokens > 1)


def _agreement(
    measured: Measured,
    figure: str,
    ours: Callable[[Block], float],
    theirs: Callable[[OutsideBlock], float],
    tolerance: float,
) -> Agreement:
    our_values = [ours(pair.ours) for pair in measured.pairs]
    their_values = [theirs(pair.theirs) for pair in measured.pairs]
    ratios = mean_interval([b / a for a, b in zip(our_values, their_values, strict=True)])
    verdict = judge(ratios, tolerance)
    return Agreement(measured.case, figure, mean(our_values), mean(their_values), ratios, verdict)


def _sizes(case: OutsideCase) -> tuple[object, ...]:
    asked = case.serving
    sizes = (asked.prefix_tokens, asked.suffix_tokens, asked.output_tokens, asked.concurrency, asked.tensor_parallel)
    return (asked.model, asked.stock_backend, case.data_set, *sizes)
