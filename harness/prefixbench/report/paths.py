"""Which path really ran: shares of steps by case and block, the dispatcher's reasons, and what was asked in vain."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from prefixbench.analysis.frame import KERNELS, Point
from prefixbench.case import ServingCase
from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells, figures
from prefixbench.report.material import Material, arm_rank, path_of
from prefixbench.report.view import Block, Chart, Note, Section
from prefixbench.report.words import percent

_TITLE, _QUESTION = "Which path really ran", "Did the kernels that were asked for serve the steps?"
_MOST_BARS = 40
_MOST_REASONS = 40


def violations(material: Material) -> tuple[str, ...]:
    """Paths that were asked for and did not run; `--strict` refuses them."""
    found = [(arm, material.inactive(point, arm)) for point in material.points for arm in point.arms]
    return tuple(text for _, text in sorted(found, key=lambda item: arm_rank(item[0])) if text)


def paths_section(material: Material) -> Section:
    rows = [
        (point, arm, shares)
        for point in material.points
        for arm in sorted(point.arms, key=arm_rank)
        if (shares := material.step_shares(point, arm))
    ]
    refused = violations(material)
    blocks: list[Block] = [Note("warning", text) for text in refused]
    if not rows:
        reason = "no launch counted its steps; only the plugin can"
        return Section(
            "paths", _TITLE, _QUESTION, "Nothing counted the steps.", (*blocks, Note("missing", f"{reason}."))
        )
    shown = [row for row in rows if path_of(row[1]) != "stock"][-_MOST_BARS:] or rows[-_MOST_BARS:]
    labels = [_bar_label(material, point, arm) for point, arm, _ in shown]
    values: list[list[float | None]] = [[shares[kernel] for kernel in KERNELS] for _, _, shares in shown]
    table = cells.table(
        "path-shares-data",
        "Share of decode steps by the kernel that served them",
        ("point", "asked for", *KERNELS),
        [
            [
                cells.text(material.point_label(point)),
                cells.path(path_of(arm), arm),
                *(cells.amount(shares[kernel], say=percent) for kernel in KERNELS),
            ]
            for point, arm, shares in rows
        ],
    )
    chart = Chart(
        id="path-shares",
        title="Share of decode steps by the kernel that served them",
        alt=f"Stacked bars, one for each path and point. {_finding(material, refused)}",
        figure=bars.shares(labels, KERNELS, values, figures.Axis("share of decode steps")),
        table=table,
        caption="Each bar: path, shared tokens, requests in flight. Counted by the plugin, step by step; "
        "launches without the plugin have no counters.",
    )
    blocks += [chart, *_over_time(material), *_reasons(material)]
    return Section("paths", _TITLE, _QUESTION, _finding(material, refused), tuple(blocks))


def _bar_label(material: Material, point: Point, arm: str) -> str:
    """Short enough for a phone; what differs beside prefix and concurrency follows."""
    rest = material.family_label([point]).partition(", ")[2]
    label = f"{arm} · {point.key['prefix_tokens']} · {point.key['concurrency']}"
    return f"{label} · {rest}" if rest else label


def _finding(material: Material, refused: tuple[str, ...]) -> str:
    if refused:
        return f"No, not everywhere: {refused[0]}"
    asked = {path_of(arm) for point in material.points for arm in point.arms} - {"stock"}
    if not asked:
        return "Only stock was measured."
    return f"Yes: every path asked for ({', '.join(sorted(asked))}) served its steps with its own kernels."


def _over_time(material: Material) -> list[Block]:
    """Shares block by block for the paths that choose: a dispatcher that changes its mind shows here."""
    rows = material.blocks[material.blocks["path"].isin(["full", "auto"])]
    shares = [f"share_{kernel}" for kernel in KERNELS]
    rows = rows.dropna(subset=shares)
    if rows.empty or rows["position"].nunique() < 2:
        return []
    grouped = rows.groupby(["arm", "prefix_tokens", "concurrency", "position"])[shares].mean().reset_index()
    body = [
        [
            cells.path(str(row["arm"])),
            cells.amount(int(row["prefix_tokens"])),
            cells.amount(int(row["concurrency"])),
            cells.amount(int(row["position"])),
            *(cells.amount(float(row[share]), say=percent) for share in shares),
        ]
        for _, row in pd.DataFrame(grouped).iterrows()
    ]
    columns = ("path", "shared prefix", "in flight", "block", *KERNELS)
    return [cells.table("path-shares-by-block", "The same, block by block", columns, body, folded=True)]


def _reasons(material: Material) -> list[Block]:
    tally: Counter[tuple[str, str]] = Counter()
    for record in material.records:
        if not isinstance(record.case, ServingCase) or not isinstance(record.measurement, ServingMeasurement):
            continue
        for block in record.measurement.blocks:
            for reason, steps in ((block.counters and block.counters.reasons) or {}).items():
                tally[record.case.path, reason] += steps
    if not tally:
        return []
    shown = tally.most_common(_MOST_REASONS)
    rest = f", the commonest {len(shown)} of {len(tally):,} reasons" if len(shown) < len(tally) else ""
    body = [
        [cells.path(path), cells.text(reason), cells.amount(steps)]
        for (path, reason), steps in sorted(shown, key=lambda item: (arm_rank(item[0][0]), -item[1]))
    ]
    caption = f"Why the dispatcher chose as it did{rest}"
    return [cells.table("reasons", caption, ("path", "reason", "group steps"), body)]
