"""Clocks beside the figures: how fast the GPU ran while each path was measured, and which work hit the power cap."""

from __future__ import annotations

import math

from prefixbench.analysis.frame import Point
from prefixbench.report import cells
from prefixbench.report.material import Material, arm_rank, path_of
from prefixbench.report.view import Block, Cell, Note
from prefixbench.report.words import count, number, percent

_UNWATCHED = "nobody watched this device's clocks"


def clock(material: Material, point: Point, arm: str) -> float | None:
    """Mean SM clock (MHz) over the launches of an arm; None where it was not watched."""
    return material.mean(point, arm, "sm_clock_mhz").estimate


def clock_cell(material: Material, point: Point, arm: str) -> Cell:
    """The clock, and in how many of its samples the power cap held it."""
    mhz, share = clock(material, point, arm), _cap(material, point, arm)
    if mhz is None:
        return cells.missing(_UNWATCHED)
    return Cell(f"{number(mhz, 4)}, power cap {percent(share, 0)}" if share else number(mhz, 4), mhz)


def clock_blocks(material: Material) -> list[Block]:
    """A note where the power cap was met, and the clocks of every path; nothing where no clock is known."""
    watched = [
        (point, arm)
        for point in material.points
        for arm in sorted(point.arms, key=arm_rank)
        if clock(material, point, arm) is not None
    ]
    if not watched:
        return []
    capped = [(point, arm) for point, arm in watched if _cap(material, point, arm)]
    rows = [
        [
            cells.text(material.point_label(point)),
            cells.path(path_of(arm), arm),
            cells.amount(clock(material, point, arm), say=lambda mhz: number(mhz, 4)),
            cells.amount(material.mean(point, arm, "power_w").estimate, "this GPU does not tell its power"),
            cells.amount(_cap(material, point, arm), "this GPU gives no reasons", percent),
        ]
        for point, arm in watched
    ]
    columns = ("point", "path", "SM clock, MHz", "highest power, W", "samples at the power cap")
    table = cells.table("clocks", "Clocks while each path ran (mean over launches, idle left out)", columns, rows)
    return [*([Note("info", _note(material, capped, len(watched)))] if capped else []), table]


def _note(material: Material, capped: list[tuple[Point, str]], of: int) -> str:
    point, arm = min(capped, key=lambda item: clock(material, *item) or math.inf)
    baseline = material.baseline(point)
    beside = clock(material, point, baseline) if baseline and baseline != arm else None
    text = (
        f"The GPU's power cap was met in {len(capped)} of {count(of, 'combination')} of path and point. "
        f"That work draws more than the GPU may, so the GPU lowers its clock: {arm} ran at "
        f"{number(clock(material, point, arm), 4)} MHz on average at {material.point_label(point)}"
    )
    text += f", where {baseline} ran at {number(beside, 4)} MHz" if beside else ""
    return f"{text}. That is a property of the work and is in its figures; nothing was left out for it."


def _cap(material: Material, point: Point, arm: str) -> float | None:
    return material.mean(point, arm, "power_cap_share").estimate
