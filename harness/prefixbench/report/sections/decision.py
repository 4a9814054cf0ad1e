"""What the dispatcher itself costs: host microseconds to decide and to plan one decode step."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.dispatcher.decisions import decisions
from prefixbench.analysis.stats import mean_interval
from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.view import Block, Cell


def decision_blocks(records: Sequence[Record]) -> list[Block]:
    """One row for each case: medians of a launch, then the mean over launches; nothing where it was not timed."""
    timed = decisions(records)
    if timed.empty:
        return []
    rows: list[list[Cell]] = []
    for _, launches in timed.groupby(["case_hash", "device"], sort=False):
        last = launches.iloc[-1]
        decided, planned = (mean_interval(launches[name].tolist()) for name in ("decision_us", "planning_us"))
        rows.append(
            [
                cells.text(last["mode"]),
                cells.amount(int(last["batch"])),
                cells.amount(int(last["groups"])),
                cells.text(last["change"]),
                cells.path(str(last["path_chosen"])),
                cells.amount(decided.estimate, decided.note),
                cells.interval(decided.low, decided.high, decided.note),
                cells.amount(planned.estimate, planned.note),
                cells.text("with copies to the device" if last["with_device_copies"] else "host only"),
                cells.text(last["device"]),
            ]
        )
    asked = ("mode", "rows", "groups", "since the step before", "chosen")
    columns = (*asked, "decision, µs", "95% interval", "decision and planning, µs", "measured", "machine")
    caption = "What deciding and planning one decode step costs the host (median of a launch, mean over launches)"
    return [cells.table("decision-cost", caption, columns, rows)]
