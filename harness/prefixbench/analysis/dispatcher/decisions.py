"""What deciding and planning a step costs on the host, and what share of a measured step that is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
import pandas as pd

from prefixbench.analysis.frame import Point, device_name
from prefixbench.case import DispatchCase
from prefixbench.record import DispatchMeasurement, Record

SHARING_ARMS = ("cascade", "dense", "full", "auto")


def decisions(records: Sequence[Record]) -> pd.DataFrame:
    """One row per dispatch record: medians over its steps, and the 99th percentile of planning."""
    rows = []
    for record in records:
        case, measured = record.case, record.measurement
        if not isinstance(case, DispatchCase) or not isinstance(measured, DispatchMeasurement):
            continue
        if not measured.decision_us or not measured.planning_us:
            continue
        rows.append(
            {
                "record_id": record.record_id,
                "case_hash": record.case_hash,
                "launch_id": record.launch.launch_id,
                "device": device_name(record.environment),
                "mode": case.mode,
                "groups": case.groups,
                "batch": case.batch,
                "change": case.change,
                "path_chosen": measured.path_chosen,
                "decision_us": median(measured.decision_us),
                "planning_us": median(measured.planning_us),
                "planning_p99_us": float(np.quantile(measured.planning_us, 0.99)),
                "with_device_copies": measured.with_device_copies,
            }
        )
    return pd.DataFrame(rows)


def fastest_steps_ms(points: Sequence[Point]) -> dict[int, float]:
    """Requests in flight -> the shortest decode step (time per output token) of any sharing path at any point.

    The shortest one, because planning is the largest share of it.
    """
    steps: dict[int, float] = {}
    for point in points:
        batch = int(str(point.key["concurrency"]))
        for arm in SHARING_ARMS:
            values = point.sample(arm, "tpot_ms").values()
            if values:
                steps[batch] = min([*values, steps.get(batch, float("inf"))])
    return steps
