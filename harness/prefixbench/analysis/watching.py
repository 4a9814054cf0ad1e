"""What telemetry costs in throughput: blocks with it over their neighbours without, within a launch.

The replicate is the pair of neighbouring blocks, not the launch: both ran on the same server, one after the other. So
an interval speaks for its launch alone. Rules about clocks leave nothing out here: only one block of a pair has any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from prefixbench.analysis.metrics import block_metrics
from prefixbench.analysis.stats import Interval, mean_interval
from prefixbench.case import ServingCase
from prefixbench.machine.clocks import NOT_WATCHED
from prefixbench.record import Block, Record, ServingMeasurement

BOUND = 0.005
"""The share of throughput that telemetry may cost."""

Verdict = Literal["under", "over", "undecided"]


@dataclass(frozen=True)
class WatchingCost:
    """Decode tok/s of one case in one launch. `ratio` is watched over not watched, over `ratio.n` pairs of blocks;
    `pairs_left_out` lack a figure, a cached prefix or the samples. `samples_per_s` were really taken."""

    record: Record
    case: ServingCase
    watched_tok_s: float | None
    unwatched_tok_s: float | None
    samples_per_s: float | None
    ratio: Interval
    pairs_left_out: int
    verdict: Verdict


def watching_costs(records: Sequence[Record]) -> list[WatchingCost]:
    """One for every serving record that has blocks of both kinds."""
    return [
        _cost(record, record.case, measured.blocks)
        for record in records
        if isinstance(record.case, ServingCase)
        and isinstance(measured := record.measurement, ServingMeasurement)
        and len({NOT_WATCHED in block.flags for block in measured.blocks}) == 2
    ]


def judge(ratio: Interval) -> Verdict:
    """Only a whole interval on one side of the bound decides."""
    if ratio.low is None or ratio.high is None:
        return "undecided"
    if ratio.low > 1 - BOUND:
        return "under"
    return "over" if ratio.high < 1 - BOUND else "undecided"


def _cost(record: Record, case: ServingCase, blocks: Sequence[Block]) -> WatchingCost:
    pairs = list(_pairs(blocks))
    figures = [(a, b) for a, b in ((_tok_s(watched), _tok_s(other)) for watched, other in pairs) if a and b]
    sampled = [watched for watched, _ in pairs if watched.wall_s > 0]
    ratio = mean_interval([watched / other for watched, other in figures])
    if ratio.n < 2:
        ratio = replace(ratio, note=f"an interval needs at least 2 pairs of blocks, {ratio.n} can be compared")
    return WatchingCost(
        record=record,
        case=case,
        watched_tok_s=_mean(a for a, _ in figures),
        unwatched_tok_s=_mean(b for _, b in figures),
        samples_per_s=_mean(max(len(d.samples) for d in block.telemetry) / block.wall_s for block in sampled),
        ratio=ratio,
        pairs_left_out=len(blocks) // 2 - len(figures),
        verdict=judge(ratio),
    )


def _pairs(blocks: Sequence[Block]) -> Iterator[tuple[Block, Block]]:
    """(watched, not watched) of blocks that followed one another. A block whose device could not be watched is neither:
    nobody asked it anything."""
    for pair in zip(blocks[::2], blocks[1::2], strict=False):
        watched = [block for block in pair if any(device.samples for device in block.telemetry)]
        others = [block for block in pair if NOT_WATCHED in block.flags]
        if len(watched) == len(others) == 1 and not any("cold-cache" in block.flags for block in pair):
            yield watched[0], others[0]


def _tok_s(block: Block) -> float | None:
    return block_metrics(block).decode_tok_s.value


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
