"""Kernel records of one device -> its cost profile, and what a reader of that profile wants to know about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from prefixbench.analysis.dispatcher.cost_fit import Fitted, fit
from prefixbench.analysis.dispatcher.thresholds import dense_threshold, sharing_thresholds
from prefixbench.analysis.dispatcher.timed_cells import TimedGrid, timed_grid
from prefixbench.analysis.stats import Interval
from prefixbench.errors import UsageError
from prefixbench.record import Record
from prefixonce.cost import CONSERVATIVE, Profile

TILE_ROWS = 128
"""Query rows of a prefix tile of our GPU kernels at head_dim up to 128."""


@dataclass(frozen=True)
class Calibration:
    """`about` goes into the file of the profile, for people: where the fit comes from and how far off it is."""

    grid: TimedGrid
    fitted: Fitted
    dense: Interval | None
    sharing: dict[int, Interval]
    about: dict[str, object]


def calibrate(records: Sequence[Record]) -> Calibration:
    """Fits the cost model; UsageError where the records are of several devices or too few."""
    grid = timed_grid(records)
    newest = max(records, key=lambda record: record.launch.started_at)
    fitted = fit(grid.complete, _known(grid, newest))
    dense, sharing = dense_threshold(grid.cells), sharing_thresholds(grid.cells)
    about: dict[str, object] = {
        "date": _date(newest),
        "stock": grid.stock,
        "l2": grid.l2,
        "cells": fitted.cells,
        "relative_errors": {path.value: asdict(found) for path, found in fitted.residuals.items()},
        "dense_over_cascade_from_m_eff": None if dense is None else _bounds(dense),
        "sharing_over_stock_from_m_eff": {str(prefix): _bounds(found) for prefix, found in sharing.items()},
        "launches": sorted({record.launch.launch_id for record in records}),
        "plugin_source": (newest.notes or {}).get("plugin_source"),
        "git_commit": newest.environment.git_commit,
        "driver": newest.environment.gpus[0].driver if newest.environment.gpus else None,
        "packages": newest.environment.packages,
    }
    return Calibration(grid, fitted, dense, sharing, about)


def _known(grid: TimedGrid, newest: Record) -> Profile:
    """What is not fitted. A CPU counts as one processor without tiles."""
    source = f"calibrated on {_date(newest)}; stock is {grid.stock}, L2 {grid.l2}"
    known = replace(CONSERVATIVE, device=grid.device, source=source, processors=1, tile_rows=1)
    if not newest.environment.gpus:
        return known
    sm_count = newest.environment.gpus[0].sm_count
    if sm_count is None:
        raise UsageError(f"record {newest.record_id} does not say how many SMs {grid.device} has; measure it again")
    return replace(known, processors=sm_count, tile_rows=TILE_ROWS)


def _date(record: Record) -> str:
    return record.launch.started_at[:10]


def _bounds(found: Interval) -> dict[str, float | None]:
    """None stands for infinity, which JSON lacks: it never pays where it was timed."""
    values = {"estimate": found.estimate, "low": found.low, "high": found.high}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
