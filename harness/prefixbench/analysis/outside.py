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
        values = _both(self.pairs, tok_s, outside_tok_s)
        ours, theirs = ({f"{label} {i}": value[side] for i, value in enumerate(values)} for side in (0, 1))
        return ours, theirs


def agreements(records: Sequence[Record], tolerance: float = TOLERANCE) -> list[Agreement]:
    """Two figures of every case where they are defined: output tok/s over the whole block, and milliseconds per output
    token."""
    return [
        _agreement(measured.case, name, values, tolerance)
        for measured in by_case(records)
        for name, values in (
            ("output tok/s", _both(measured.pairs, tok_s, outside_tok_s)),
            ("ms per output token", _both(measured.pairs, tpot_ms, outside_tpot_ms)),
        )
        if values
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


def tok_s(block: Block) -> float | None:
    """Output tokens per second of the whole block; None, as below, where nothing was decoded in any time."""
    return _rate(sum(sample.output_tokens for sample in block.requests), block.wall_s)


def tpot_ms(block: Block) -> float | None:
    """Mean over requests of the time from first to last chunk, per token in between; as the other client defines it."""
    spans = [(sample.chunks[0], sample.chunks[-1]) for sample in block.requests if len(sample.chunks) > 1]
    times_s = [(end_s - begin_s) / (last - first) for (first, begin_s), (last, end_s) in spans if last > first]
    return 1e3 * mean(times_s) if times_s else None


def outside_tok_s(block: OutsideBlock) -> float | None:
    return _rate(sum(block.output_tokens), block.wall_s)


def outside_tpot_ms(block: OutsideBlock) -> float | None:
    pairs = zip(block.decode_s, block.output_tokens, strict=True)
    times_s = [seconds / (tokens - 1) for seconds, tokens in pairs if tokens > 1]
    return 1e3 * mean(times_s) if times_s else None


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _both(
    pairs: Sequence[OutsidePair],
    ours: Callable[[Block], float | None],
    theirs: Callable[[OutsideBlock], float | None],
) -> list[tuple[float, float]]:
    """The figure by both clients, of the pairs in which it is defined for both."""
    values = ((ours(pair.ours), theirs(pair.theirs)) for pair in pairs)
    return [(a, b) for a, b in values if a and b]


def _agreement(case: OutsideCase, figure: str, values: Sequence[tuple[float, float]], tolerance: float) -> Agreement:
    ratios = mean_interval([theirs / ours for ours, theirs in values])
    ours, theirs = (mean(value[side] for value in values) for side in (0, 1))
    return Agreement(case, figure, ours, theirs, ratios, judge(ratios, tolerance))


def _sizes(case: OutsideCase) -> tuple[object, ...]:
    asked = case.serving
    sizes = (asked.prefix_tokens, asked.suffix_tokens, asked.output_tokens, asked.concurrency, asked.tensor_parallel)
    return (asked.model, asked.stock_backend, case.data_set, *sizes)
