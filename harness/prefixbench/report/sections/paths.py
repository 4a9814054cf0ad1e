"""Which path really ran: shares of steps by case and block, the dispatcher's reasons, and what was asked in vain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from prefixbench.analysis.frame import KERNELS, Point
from prefixbench.case import ServingCase
from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells, figures
from prefixbench.report.material import Material, arm_rank, path_of
from prefixbench.report.view import Block, Chart, Note, Section
from prefixbench.report.words import count, percent

_TITLE, _QUESTION = "Which path really ran", "Did the kernels that were asked for serve the steps?"
_MOST_BARS = 40
_MOST_REASONS = 40
_MOST_STRIPS = 16
_CHOOSING = ("full", "auto")
_ALONE = 0.995


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
    columns = [f"share_{kernel}" for kernel in KERNELS]
    counted = material.blocks[material.blocks["path"].isin(_CHOOSING)].dropna(subset=columns)
    counted = counted.sort_values(["started_at", "position"])
    by_record: defaultdict[str, list[tuple[str, int, tuple[float, ...]]]] = defaultdict(list)
    for record_id, launch, position, *shares in zip(
        *(counted[name].tolist() for name in ("record_id", "launch_id", "position", *columns)), strict=True
    ):
        by_record[record_id].append((launch, position, tuple(shares)))
    strips = [
        (_bar_label(material, point, arm), arm, strip)
        for point in material.points
        for arm in (arm for arm in _CHOOSING if arm in point.arms)
        if (strip := [block for record_id in point.record_ids(arm) for block in by_record[record_id]])
    ]
    if max((len(strip) for *_, strip in strips), default=0) < 2:
        return []
    tiles = [
        _strip_tile(label, number, launch, position, shares)
        for label, _, strip in strips[-_MOST_STRIPS:]
        for number, (launch, position, shares) in enumerate(strip, start=1)
    ]
    rows = [
        [
            cells.path(arm, label),
            cells.amount(number),
            cells.text(launch),
            cells.amount(position),
            *(cells.amount(share, say=percent) for share in shares),
        ]
        for label, arm, strip in strips
        for number, (launch, position, shares) in enumerate(strip, start=1)
    ]
    mixed = sum(bool(tile.text) for tile in tiles)
    cut = f" The last {_MOST_STRIPS} of {len(strips)}; the table has all." if len(strips) > _MOST_STRIPS else ""
    chart = Chart(
        id="path-shares-over-time",
        title="The kernel that served most steps, block by block",
        alt=f"Blocks in order of time, coloured by kernel: {mixed} of {count(len(tiles), 'block')} were mixed.",
        figure=bars.tile_map(
            tiles, figures.Axis("block, in order of time"), figures.Axis(""), "served most steps", row_height=28
        ),
        table=cells.table(
            "path-shares-over-time-data",
            "Share of decode steps by kernel, block by block",
            ("path", "block", "launch", "place in launch", *KERNELS),
            rows,
        ),
        caption=f"A number says how much the leading kernel served where it was not alone.{cut}",
    )
    return [chart]


def _strip_tile(label: str, number: int, launch: str, position: int, shares: Sequence[float]) -> bars.Tile:
    leading = max(shares)
    said = ", ".join(f"{kernel} {percent(share)}" for kernel, share in zip(KERNELS, shares, strict=True) if share)
    return bars.Tile(
        x=str(number),
        y=label,
        path=KERNELS[shares.index(leading)],
        text="" if leading > _ALONE else percent(leading, 0),
        hover=f"launch {launch}, block {position}: {said}",
        outlined=False,
    )


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
