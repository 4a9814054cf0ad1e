"""Judges of the claims about kernels and the dispatcher's threshold: K1 to K4, D1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from prefixbench.analysis.claims.evidence import Evidence, Finding, Judge, figure, not_run
from prefixbench.analysis.claims.reported import Claim
from prefixbench.analysis.dispatcher.thresholds import dense_threshold, sharing_thresholds
from prefixbench.analysis.dispatcher.timed_cells import TimedCell, timed_cells
from prefixbench.analysis.frame import sample
from prefixbench.analysis.stats import Interval, mean_interval, ratio
from prefixonce.step import Path

SHAPE = ["prefix_tokens", "suffix_tokens", "batch", "q_heads", "kv_heads", "head_dim", "dtype", "l2", "device"]
READ_ONCE = ("cascade", "dense")
_NO_KERNELS = "no such kernel was timed on a GPU: `prefixbench kernels` on one does it"


@dataclass(frozen=True)
class Cell:
    """Launches of two kernels (or one kernel on two layouts) at one shape."""

    shape: dict[str, object]
    unique: pd.DataFrame
    shared: pd.DataFrame

    @property
    def prefix_bytes(self) -> int:
        sizes = [int(str(self.shape[name])) for name in ("prefix_tokens", "kv_heads", "head_dim")]
        element = 4 if self.shape["dtype"] == "float32" else 2
        return 2 * sizes[0] * sizes[1] * sizes[2] * element

    @property
    def label(self) -> str:
        s = self.shape
        return f"prefix {s['prefix_tokens']}, {s['batch']} requests, {s['q_heads']}/{s['kv_heads']} heads"

    def record_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.unique["record_id"], *self.shared["record_id"]]))


def judge_reads(claim: Claim, evidence: Evidence) -> Finding:
    """K1: DRAM reads of one launch in units of the prefix, paged on unique data against read-once on shared."""
    cell = _largest(_cells(_counted(evidence), ("paged",), READ_ONCE))
    if cell is None:
        return not_run(
            "needs hardware counters of a paged and a read-once launch (ncu on a GPU)", _counted_reads(evidence)
        )
    sides = (_per_launch(rows, "dram_read_bytes", cell.prefix_bytes) for rows in (cell.unique, cell.shared))
    paged, once = (mean_interval(side) for side in sides)
    batch, tolerance = float(str(cell.shape["batch"])), claim.number("tolerance")
    # Queries and suffixes are read as well: they may add to the one read, and only add to the many.
    is_many = (paged.estimate or 0) >= batch * (1 - tolerance)
    is_once = (once.estimate or 0) <= 1 + tolerance + _query_reads(cell)
    holds = is_many and is_once
    return Finding(
        "reproduced" if holds else "differs",
        f"DRAM reads of one launch over the bytes of the prefix; {cell.label}",
        f"{figure(paged, '{:.1f}')} paged, {figure(once, '{:.2f}')} read-once",
        once,
        str(cell.shape["device"]),
        cell.record_ids(),
    )


def judge_traffic(claim: Claim, evidence: Evidence) -> Finding:
    """K2: DRAM bytes of the claimed launch."""
    cells = [c for c in _cells(_counted(evidence), ("paged", "dense"), READ_ONCE) if _is_claimed(c, claim)]
    if not cells:
        return not_run("the claimed launch was not measured with hardware counters (ncu on a GPU)")
    cell = cells[0]
    paged, once = (mean_interval(_per_launch(rows, "dram_read_bytes", 1)) for rows in (cell.unique, cell.shared))
    times = (paged.estimate or 0) / (once.estimate or 1)
    holds = times >= claim.number("ratio") * (1 - claim.number("tolerance"))
    return Finding(
        "reproduced" if holds else "differs",
        f"DRAM bytes read by one launch; {cell.label}",
        f"{figure(paged, '{:.3g} B')} paged, {figure(once, '{:.3g} B')} shared, {times:.0f}x",
        once,
        str(cell.shape["device"]),
        cell.record_ids(),
    )


def judge_latency(claim: Claim, evidence: Evidence) -> Finding:
    """K3: the same dense kernel on unique and on shared data."""
    cells = _cells(evidence.gpu_kernels(), ("dense",), ("dense",))
    cell = next((c for c in cells if _is_claimed(c, claim)), _largest(cells))
    if cell is None:
        return not_run(_NO_KERNELS)
    unique, shared = sample(cell.unique, "kernel_us"), sample(cell.shared, "kernel_us")
    times = ratio(unique, shared)
    microseconds = [figure(mean_interval(list(side.values())), "{:.4g} us") for side in (shared, unique)]
    measured = f"{microseconds[0]} shared, {microseconds[1]} unique, {figure(times, '{:.3g}x')}"
    finding = Finding(
        "differs", f"{cell.label}, L2 {cell.shape['l2']}", measured, times, str(cell.shape["device"]), cell.record_ids()
    )
    if not _is_claimed(cell, claim):
        return not_run(f"the claimed shape was not timed; shown: {cell.label}", finding)
    return _at_least(finding, times, claim)


def judge_headroom(claim: Claim, evidence: Evidence) -> Finding:
    """K4: what the paged kernel leaves of the memory bandwidth."""
    rows = evidence.gpu_kernels()
    chosen = rows if rows.empty else rows[(rows["implementation"] == "paged") & (rows["layout"] == "unique")]
    chosen = chosen if chosen.empty else chosen[chosen["copy_bytes_per_s"].notna()]
    if chosen.empty:
        return not_run("the paged kernel was not timed on unique data beside the copy bandwidth of a GPU")
    largest = chosen[chosen["model_bytes"] == chosen["model_bytes"].max()]
    headroom = mean_interval(
        list((largest["copy_bytes_per_s"] / largest["bytes_per_s"]).groupby(largest["launch_id"]).mean())
    )
    holds = (headroom.estimate or 0) <= claim.number("headroom") * (1 + claim.number("tolerance"))
    return Finding(
        "reproduced" if holds else "differs",
        "copy bandwidth over the paged kernel's, at the largest shape timed",
        f"tuning buys at most {figure(headroom)}; {1 / (headroom.estimate or 1):.0%} of the copy bandwidth",
        headroom,
        str(largest["device"].iloc[0]),
        tuple(largest["record_id"]),
    )


def judge_threshold(claim: Claim, evidence: Evidence) -> Finding:
    """D1: the M_eff from which dense is the better choice than cascade, fitted to the newest GPU's cells."""
    rows = evidence.gpu_kernels()
    newest = rows if rows.empty else rows[rows["device"] == rows.sort_values("started_at")["device"].iloc[-1]]
    cells = [cell for cell in timed_cells(newest) if {Path.CASCADE, Path.DENSE} <= set(cell.us)]
    found = dense_threshold(cells)
    if found is None or found.low is None or found.high is None:
        return not_run("cascade and dense were not both timed over a range of M_eff on a GPU")
    finding = Finding(
        "reproduced" if found.low <= claim.number("m_eff") <= found.high else "differs",
        "the claim is for an A100 and asks for a refit elsewhere; this is the refit (interval: cells resampled)",
        f"dense pays from M_eff {figure(found, '{:,.0f}')}; {_sharing(cells)}",
        found,
        str(newest["device"].iloc[0]),
        tuple(dict.fromkeys(record_id for cell in cells for record_id in cell.record_ids)),
    )
    largest = max(cell.m_eff for cell in cells)
    if found.estimate == math.inf and largest < claim.number("m_eff"):
        return not_run(f"dense never paid up to M_eff {largest}, the largest that was timed", finding)
    return finding


def _sharing(cells: Sequence[TimedCell]) -> str:
    found = sharing_thresholds(cells)
    if not found:
        return "stock was not timed beside them"
    said = ", ".join(f"{interval.estimate:,.0f} at {prefix:,} tokens" for prefix, interval in found.items())
    return f"sharing pays against stock from M_eff {said}"


def _cells(rows: pd.DataFrame, unique: tuple[str, ...], shared: tuple[str, ...]) -> list[Cell]:
    """Shapes at which one of `unique` ran on unique data and one of `shared` on shared data."""
    if rows.empty:
        return []
    cells = []
    for key, group in rows.groupby(SHAPE):
        apart = group[(group["layout"] == "unique") & group["implementation"].isin(unique)]
        together = group[(group["layout"] != "unique") & group["implementation"].isin(shared)]
        if apart.empty or together.empty:
            continue
        best = together.groupby("implementation")["kernel_us"].mean().idxmin()
        kernel = unique[0] if unique[0] in set(apart["implementation"]) else apart["implementation"].iloc[0]
        cells.append(
            Cell(
                dict(zip(SHAPE, key, strict=True)),
                apart[apart["implementation"] == kernel],
                together[together["implementation"] == best],
            )
        )
    return sorted(cells, key=lambda cell: cell.shape["l2"] != "warm")


def _largest(cells: list[Cell]) -> Cell | None:
    return max(cells, key=lambda c: int(str(c.shape["batch"])) * int(str(c.shape["prefix_tokens"])), default=None)


def _is_claimed(cell: Cell, claim: Claim) -> bool:
    return all(cell.shape[name] == value for name, value in claim.values.items() if name in cell.shape)


def _counted(evidence: Evidence) -> pd.DataFrame:
    rows = evidence.gpu_kernels()
    return rows if rows.empty else rows[rows["dram_read_bytes"].notna()]


def _per_launch(rows: pd.DataFrame, column: str, unit: float) -> list[float]:
    return [float(value) / unit for value in rows.groupby("launch_id")[column].mean()]


def _query_reads(cell: Cell) -> float:
    """Bytes of the queries and the suffixes in units of the prefix."""
    batch, heads, suffix, kv_heads, prefix = (
        int(str(cell.shape[name])) for name in ("batch", "q_heads", "suffix_tokens", "kv_heads", "prefix_tokens")
    )
    return batch * (heads + 2 * suffix * kv_heads) / (2 * prefix * kv_heads)


def _at_least(finding: Finding, interval: Interval, claim: Claim) -> Finding:
    needed = claim.number("ratio") * (1 - claim.number("tolerance"))
    if interval.estimate is not None and interval.estimate >= needed:
        return Finding(
            "reproduced",
            f"at least the reported ratio; {finding.why}",
            finding.measured,
            interval,
            finding.hardware,
            finding.record_ids,
        )
    return finding


def _counted_reads(evidence: Evidence) -> Finding | None:
    """What the running server counted: a model of the traffic, no measurement of it."""
    for point in reversed(evidence.points):
        rows = point.rows[point.rows["reads_replaced"].notna()]
        if len(rows):
            reads = mean_interval(list(rows["reads_replaced"]))
            text = f"{reads.estimate:.1f} prefix tokens read by stock for each one read here, as the server counted"
            return Finding("not run here", "", text, reads, str(point.key["device"]), tuple(rows["record_id"]))
    return None


JUDGES: dict[str, Judge] = {
    "K1": judge_reads,
    "K2": judge_traffic,
    "K3": judge_latency,
    "K4": judge_headroom,
    "D1": judge_threshold,
}
