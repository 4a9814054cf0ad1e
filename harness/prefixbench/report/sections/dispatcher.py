"""The dispatcher against measurement: which path was fastest at which M_eff, and what each rule would have cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from prefixbench.analysis.claims.evidence import is_gpu
from prefixbench.analysis.dispatcher.regret import Rule, regret, rules
from prefixbench.analysis.dispatcher.thresholds import dense_threshold, sharing_thresholds
from prefixbench.analysis.dispatcher.timed_cells import TimedCell, stock_peer, timed_cells
from prefixbench.analysis.stats import Interval
from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells
from prefixbench.report.figures import Axis
from prefixbench.report.material import Material
from prefixbench.report.sections.decision import decision_blocks
from prefixbench.report.view import Block, Chart, Note, Section, Switch, Table
from prefixbench.report.words import count, number, path_rank, percent
from prefixonce.cost import profile_for
from prefixonce.step import Path

REPORTED_THRESHOLD = 1024
_TITLE, _QUESTION = "Dispatcher", "From how many queries on does the dense kernel pay?"


def dispatcher_section(material: Material) -> Section:
    rows = _of_one_device(material.kernels)
    timed = [cell for cell in timed_cells(rows) if len(cell.us) > 1]
    blocks: list[Block] = [*_served_with(material)]
    if not timed:
        why = "no kernel record of this selection times two paths on one shape (the verb kernels does)"
        blocks += [Note("missing", f"The measured map: {why}."), *decision_blocks(material.records)]
        return Section("dispatcher", _TITLE, _QUESTION, "The threshold was not measured here.", tuple(blocks))
    device, peer = str(rows["device"].iloc[0]), stock_peer(rows)
    fitted = dense_threshold(timed)
    maps = _maps(timed, device, peer)
    blocks.append(maps[0][1] if len(maps) == 1 else Switch("map", "Shared prefix + own tokens", tuple(maps)))
    blocks += [*_thresholds(timed, fitted), *_regret(timed, fitted, device), *decision_blocks(material.records)]
    return Section("dispatcher", _TITLE, _QUESTION, _finding(timed, fitted), tuple(blocks))


def _served_with(material: Material) -> list[Note]:
    used = {
        record.measurement.dispatch_threshold_m_eff
        for record in material.records
        if isinstance(record.measurement, ServingMeasurement) and record.measurement.dispatch_threshold_m_eff
    }
    if not used:
        return []
    text = f"The servers of this selection ran with the threshold M_eff = {', '.join(map(str, sorted(used)))}."
    return [Note("info", f"{text} M_eff is requests that share a prefix × query heads per KV head.")]


def _of_one_device(rows: pd.DataFrame) -> pd.DataFrame:
    """The device with most timings, a GPU before a CPU: times of two devices make no map together."""
    if rows.empty:
        return rows
    sizes = rows["device"].value_counts()
    chosen = max(map(str, sizes.index), key=lambda name: (is_gpu(name), int(sizes[name])))
    return rows[rows["device"] == chosen]


def _best(cell: TimedCell) -> Path:
    return min(cell.us, key=lambda path: cell.us[path])


def _finding(timed: Sequence[TimedCell], fitted: Interval | None) -> str:
    if fitted is None:
        return "Cascade and dense were not timed over a range of M_eff, so no threshold can be fitted."
    where = f"fitted to {count(fitted.n, 'shape')}"
    if fitted.estimate == math.inf:
        largest = max(cell.m_eff for cell in timed)
        return (
            f"The dense kernel never paid up to M_eff = {largest:,}, {where}; the reported threshold is "
            f"{REPORTED_THRESHOLD:,}, from another GPU."
        )
    return (
        f"The dense kernel pays from M_eff = {_m_eff(fitted.estimate)} on (95% interval {_span(fitted)}, {where}); "
        f"the reported threshold is {REPORTED_THRESHOLD:,}, from another GPU."
    )


def _m_eff(value: float | None) -> str:
    return "never" if value == math.inf else number(None if value is None else round(value))


def _span(found: Interval) -> str:
    return f"{_m_eff(found.low)} to {_m_eff(found.high)}"


def _maps(timed: Sequence[TimedCell], device: str, peer: str | None) -> list[tuple[str, Chart]]:
    """One map for each length of prefix and of what follows it."""
    grouped: defaultdict[tuple[int, int], list[TimedCell]] = defaultdict(list)
    for cell in timed:
        grouped[cell.layer.prefix_tokens, int(cell.layer.own_tokens)].append(cell)
    maps = []
    for index, ((prefix, own), group) in enumerate(sorted(grouped.items())):
        label = f"{prefix:,}{f' + {own:,}' if own else ''} tokens"
        maps.append((label, _map(index, label, group, f"{device}; stock is {peer}." if peer else f"{device}.")))
    return maps


def _map(index: int, label: str, timed: Sequence[TimedCell], machine: str) -> Chart:
    own = sorted(timed, key=lambda c: (c.layer.q_heads // c.layer.kv_heads, c.layer.kv_heads, c.layer.rows))
    drawn = [
        bars.Tile(
            x=str(cell.layer.rows),
            y=f"{cell.layer.q_heads}/{cell.layer.kv_heads}",
            path=_best(cell).value,
            text=f"{cell.m_eff:,}",
            hover=f"M_eff {cell.m_eff:,}: "
            + ", ".join(f"{path.value} {number(us)} µs" for path, us in sorted(cell.us.items(), key=lambda i: i[1])),
            outlined=cell.m_eff >= REPORTED_THRESHOLD,
        )
        for cell in own
    ]
    paths = sorted({path for cell in own for path in cell.us}, key=lambda path: path_rank(path.value))
    wins = {path: sum(_best(cell) is path for cell in own) for path in paths}
    said = ", ".join(f"{path.value} fastest at {times} of {len(own)}" for path, times in wins.items() if times)
    not_timed = "this path was not timed on this shape"
    return Chart(
        id=f"map-{index}",
        title=f"Fastest path, {label}",
        alt=f"Map of requests in flight against query and KV heads: {said}.",
        figure=bars.tile_map(drawn, Axis("requests in flight"), Axis("query / KV heads")),
        table=cells.table(
            f"map-{index}-data",
            f"Microseconds by path, {label}",
            ("in flight", "query / KV heads", "M_eff", "fastest", *(f"{path.value} µs" for path in paths)),
            [
                [
                    cells.amount(cell.layer.rows),
                    cells.text(f"{cell.layer.q_heads}/{cell.layer.kv_heads}"),
                    cells.amount(cell.m_eff),
                    cells.path(_best(cell).value),
                    *(cells.amount(cell.us.get(path), not_timed) for path in paths),
                ]
                for cell in own
            ],
        ),
        caption=f"The number in a cell is M_eff; outlined cells are dense by the reported rule (M_eff ≥ "
        f"{REPORTED_THRESHOLD:,}). Only the colour is measured. {machine}",
    )


def _thresholds(timed: Sequence[TimedCell], fitted: Interval | None) -> list[Table]:
    found = [("dense instead of cascade", "all", fitted)] if fitted else []
    found += [
        ("reading once instead of stock", f"{prefix:,}", interval)
        for prefix, interval in sharing_thresholds(timed).items()
    ]
    if not found:
        return []
    rows = [
        [
            cells.text(what),
            cells.text(prefix),
            cells.text(_m_eff(interval.estimate)),
            cells.text(_span(interval)),
            cells.amount(interval.n),
        ]
        for what, prefix, interval in found
    ]
    caption = "From which M_eff on it pays (least time in sum; interval: shapes resampled)"
    columns = ("what", "shared prefix", "M_eff", "95% interval", "shapes")
    return [cells.table("thresholds", caption, columns, rows)]


def _regret(timed: Sequence[TimedCell], fitted: Interval | None, device: str) -> list[Block]:
    """How much longer each rule takes than the fastest path of every shape; the rules are the dispatcher's own."""
    complete = [cell for cell in timed if cell.is_complete]
    if not complete:
        why = "no shape was timed with stock, cascade and dense"
        return [Note("missing", f"Regret of the rules: {why}.")]
    profile = profile_for(device)
    found = dict(rules(profile))
    if fitted is not None and fitted.estimate is not None:
        found[f"fitted here: dense from M_eff {_m_eff(fitted.estimate)}, else cascade"] = _from(fitted.estimate)
    rows = []
    for one in (regret(name, rule, complete) for name, rule in found.items()):
        rows.append(
            [
                cells.text(one.rule),
                cells.amount(one.extra, say=percent),
                cells.amount(one.worst, say=percent),
                cells.text(one.worst_cell),
                cells.amount(one.gain_share, "the best choices save nothing over stock here", percent),
                cells.amount(one.fastest / one.cells, say=percent),
            ]
        )
    columns = (
        "rule",
        "extra time in sum",
        "at its worst shape",
        "worst shape",
        "of the possible gain",
        "picks fastest",
    )
    caption = f"Regret of each rule over {count(len(complete), 'shape')}; auto with the profile: {profile.source}"
    return [cells.table("regret", caption, columns, rows)]


def _from(threshold: float) -> Rule:
    return lambda cell: Path.DENSE if cell.m_eff >= threshold else Path.CASCADE
