"""What telemetry cost: throughput of watched blocks over that of their neighbours, or how to measure it."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.comparable import case_label
from prefixbench.analysis.frame import device_name
from prefixbench.analysis.watching import BOUND, WatchingCost, watching_costs
from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.view import Block, Cell, Note
from prefixbench.report.words import percent, ratio


def watching_blocks(records: Sequence[Record]) -> list[Block]:
    """One row for each case and launch that watched half of its blocks; else one line."""
    found = watching_costs(records)
    if not found:
        how = "prefixbench run sweep=watching does, for a GPU"
        return [Note("info", f"What telemetry costs in tokens per second was not measured here ({how}).")]
    columns = ("case", "launch", "on", "watched, tok/s", "not watched, tok/s", "samples per s", "watched ÷ not watched")
    caption = (
        f"What telemetry costs: neighbouring blocks of a launch, one of them watched; it may cost {percent(BOUND)}. "
        "The replicate is the pair of blocks, so an interval speaks for its launch alone"
    )
    more = ("95% interval", "pairs of blocks", "pairs left out", "cost")
    return [cells.table("watching", caption, (*columns, *more), [_row(cost) for cost in found])]


def _row(cost: WatchingCost) -> list[Cell]:
    measured = cost.ratio
    return [
        cells.text(case_label(cost.record)),
        cells.text(cost.record.launch.launch_id),
        cells.text(device_name(cost.record.environment)),
        cells.amount(cost.watched_tok_s, measured.note),
        cells.amount(cost.unwatched_tok_s, measured.note),
        cells.amount(cost.samples_per_s, measured.note),
        cells.amount(measured.estimate, measured.note, lambda value: ratio(value, 4)),
        cells.interval(measured.low, measured.high, measured.note, lambda value: ratio(value, 4)),
        cells.amount(measured.n),
        cells.amount(cost.pairs_left_out),
        cells.text("undecided" if cost.verdict == "undecided" else f"{cost.verdict} {percent(BOUND)}"),
    ]
