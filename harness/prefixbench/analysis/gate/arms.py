"""Records of two selections -> the arms that the gate compares: oriented log values per launch, metric by metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from prefixbench.analysis import frame
from prefixbench.analysis.comparable import (
    Mismatch,
    case_label,
    clock_mismatch,
    is_clock_own_doing,
    measured_mismatches,
)
from prefixbench.analysis.gate.family import Array
from prefixbench.record import Record

ALL_CASES = "all cases"
_GOOD = ("ok",)


@dataclass(frozen=True, eq=False)
class Arm:
    """One metric of one case: log values by launch in order of start, oriented so that more is better."""

    case: str
    metric: str
    baseline: Array
    candidate: Array
    interleaved: bool

    @property
    def launches(self) -> tuple[int, int]:
        return len(self.baseline), len(self.candidate)

    def mean(self, side: Array) -> float:
        """Geometric mean in the metric's own unit and direction."""
        return float(np.exp(_sign(self.metric) * side.mean())) if len(side) else float("nan")


@dataclass(frozen=True)
class CaseComparison:
    """What two selections hold of one case."""

    arms: tuple[Arm, ...]
    mismatches: tuple[Mismatch, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def by_case(records: Sequence[Record]) -> dict[str, list[Record]]:
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record.case_hash, []).append(record)
    return grouped


def compare_case(
    baseline: Sequence[Record], candidate: Sequence[Record], metrics: Sequence[str], exclude: Sequence[str]
) -> CaseComparison:
    """Arms of one case, or why there are none; blocks with flags of the `exclude` rule are left out and counted."""
    label = case_label(baseline[0])
    before, after = _launch_rows(baseline, exclude), _launch_rows(candidate, exclude)
    notes = [
        f"{label}, {side}: {note}"
        for side, rows in (("baseline", before), ("candidate", after))
        for note in _flag_notes(rows, exclude)
    ]
    failures = tuple(f"{label}: {text}" for text in _failures(baseline, candidate))
    if before.empty or after.empty:
        return CaseComparison((), (), failures, tuple(notes))
    if _is_spoilt(before) or _is_spoilt(after):
        mismatch = Mismatch("valid blocks", _valid_blocks(before), _valid_blocks(after), label)
        return CaseComparison((), (mismatch,), failures, tuple(notes))
    clock = clock_mismatch(before, after, label)
    if clock is not None and is_clock_own_doing(before, after):
        notes.append(f"{clock}: the power cap held the slower one, which drew no less, so this is its own doing")
    interleaved = _interleaved(before, after)
    arms = []
    for metric in metrics:
        arm = Arm(label, metric, _log_values(before, metric), _log_values(after, metric), interleaved)
        if min(arm.launches):
            arms.append(arm)
    return CaseComparison(tuple(arms), tuple(measured_mismatches(before, after, label)), failures, tuple(notes))


def primary_arm(arms: Sequence[Arm], metric: str | None) -> Arm | None:
    """The primary metric over all its cases: launch by launch, the mean of its logarithms (a geometric mean)."""
    parts = [arm for arm in arms if arm.metric == metric]
    if len(parts) < 2:
        return parts[0] if parts else None
    sizes = [min(arm.launches[side] for arm in parts) for side in (0, 1)]
    baseline = np.mean([arm.baseline[: sizes[0]] for arm in parts], axis=0)
    candidate = np.mean([arm.candidate[: sizes[1]] for arm in parts], axis=0)
    return Arm(ALL_CASES, parts[0].metric, baseline, candidate, all(arm.interleaved for arm in parts))


def _launch_rows(records: Sequence[Record], exclude: Sequence[str]) -> pd.DataFrame:
    """Launches in order of start; a kernel's launch is one block, its cell."""
    serving = frame.launches(frame.blocks(records, exclude))
    if not serving.empty:
        return serving.sort_values("started_at")
    kernels = frame.kernels(records)
    if kernels.empty:
        return kernels
    rows = kernels.groupby("launch_id", sort=False).first().reset_index().sort_values("started_at")
    reasons = [frame.flagged(flags, exclude) for flags in rows["flags"]]
    rows["blocks_excluded"] = [int(reason is not None) for reason in reasons]
    rows["blocks_used"] = 1 - rows["blocks_excluded"]
    rows["exclusions"] = [() if reason is None else (reason,) for reason in reasons]
    for l2, name in (("warm", "kernel_us"), ("cold", "kernel_cold_us")):
        timed = kernels[kernels["l2"] == l2].set_index("launch_id")["kernel_us"]
        rows[name] = rows["launch_id"].map(timed).where(rows["blocks_used"] > 0)
    return rows


def _log_values(rows: pd.DataFrame, metric: str) -> Array:
    if metric not in rows:
        return np.empty(0)
    values = rows[metric].to_numpy(dtype=np.float64)
    return np.asarray(_sign(metric) * np.log(values[values > 0]))


def _sign(metric: str) -> int:
    return 1 if frame.HIGHER_IS_BETTER[metric] else -1


def _interleaved(before: pd.DataFrame, after: pd.DataFrame) -> bool:
    """Launches taken in turns: in order of start, each next pair holds one of either side."""
    if len(before) != len(after):
        return False
    turns = sorted([(t, 0) for t in before["started_at"]] + [(t, 1) for t in after["started_at"]])
    return all(turns[i][1] != turns[i + 1][1] for i in range(0, len(turns), 2))


def _failures(baseline: Sequence[Record], candidate: Sequence[Record]) -> list[str]:
    if not any(record.status in _GOOD for record in baseline):
        return []
    return [
        f"{record.status} in launch {record.launch.launch_id}"
        + (f": {record.failure.message}" if record.failure else "")
        for record in candidate
        if record.status not in _GOOD
    ]


def _flag_notes(rows: pd.DataFrame, exclude: Sequence[str]) -> list[str]:
    """What was left out, and which other warnings the blocks that count carry."""
    if rows.empty:
        return []
    kinds = ({f.partition(":")[0] for f in flags if not frame.flagged([f], exclude)} for flags in rows["flags"])
    kept = Counter(kind for launch in kinds for kind in launch)
    left_out = int(rows["blocks_excluded"].sum())
    notes = [f"{left_out} blocks left out ({_why(rows)})"] if left_out else []
    return notes + [f"{launches} of {len(rows)} launches are flagged {flag}" for flag, launches in sorted(kept.items())]


def _is_spoilt(rows: pd.DataFrame) -> bool:
    return not rows["blocks_used"].any()


def _valid_blocks(rows: pd.DataFrame) -> str:
    used, left_out = int(rows["blocks_used"].sum()), int(rows["blocks_excluded"].sum())
    return f"{used} used, {left_out} left out" + (f" ({_why(rows)})" if left_out else "")


def _why(rows: pd.DataFrame) -> str:
    return "; ".join(dict.fromkeys(reason for reasons in rows["exclusions"] for reason in reasons))


def cases_only_in(side: Mapping[str, Sequence[Record]], other: Mapping[str, Sequence[Record]]) -> list[str]:
    return [case_label(records[0]) for key, records in side.items() if key not in other]
