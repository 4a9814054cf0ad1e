"""Why a much faster kernel makes a little faster server: prediction from f and s beside what was measured."""

from __future__ import annotations

from prefixbench.analysis import amdahl
from prefixbench.analysis.amdahl import AmdahlCheck
from prefixbench.analysis.frame import Point
from prefixbench.analysis.kernel_share import kernel_times, measured_or_derived
from prefixbench.report import cells
from prefixbench.report.figures import SYMBOLS, error_bar
from prefixbench.report.material import PLAIN, Material, path_of
from prefixbench.report.view import Block, Json, Note, Section, Table, Widget
from prefixbench.report.words import count, percent, ratio

# Where the sliders start when this run timed nothing: what the authors of the method reported.
REPORTED_SHARE, REPORTED_KERNEL_SPEEDUP = 0.6, 15.6
_TITLE = "From kernel to server"
_CAPTION = (
    "Whole step = 1 ÷ ((1 − f) + f ÷ s). What is not the prefix stays as slow as it was. "
    "Each measured point has an f of its own (see the numbers) and lies on the curve of that f."
)
_DERIVED = (
    "Some f and s are derived from kernel records and were not timed in the server: one layer's attention, timed in a "
    "process of its own at the same shape, times the layers, over the step that the server took."
)
_QUESTION = "If reading the prefix gets s times faster, why does the server not?"


def amdahl_section(material: Material) -> Section:
    checks: list[tuple[Point, AmdahlCheck]] = []
    refusals: list[tuple[Point, str]] = []
    times = kernel_times(material.kernels)
    for point in material.points:
        for arm in point.arms:
            if path_of(arm) == "stock":
                continue
            result = measured_or_derived(point, arm, material.baseline(point) or PLAIN, times)
            if isinstance(result, str):
                refusals.append((point, result))
            elif result.share.estimate is not None and result.kernel_speedup.estimate is not None:
                checks.append((point, result))
    start = _start(material, checks)
    share = start[1].share.estimate if start else None
    faster = start[1].kernel_speedup.estimate if start else None
    found = {id(point) for point, _ in checks}
    without = [pair for pair in refusals if id(pair[0]) not in found]
    blocks: list[Block] = []
    if without or start is None:
        sliders = " The sliders start at the reported 60% and 15.6×, not at ours." if start is None else ""
        blocks.append(Note("missing", f"f and s ({_refusal(material, without)}).{sliders}"))
    if any(check.is_derived for _, check in checks):
        blocks.append(Note("info", _DERIVED))
    apart = [check for _, check in checks if check.contradiction]
    if apart:
        text = f"At {len(apart)} of {len(checks)} points prediction and measurement contradict each other"
        blocks.append(Note("warning", f"{text}; the table below says where and how."))
    blocks.append(
        Widget(
            id="amdahl-curve",
            name="amdahl",
            title="Move the two numbers",
            alt="Speed-up of the whole step against the speed-up of its prefix share, with the measured points.",
            data={
                "f": REPORTED_SHARE if share is None else share,
                "s": REPORTED_KERNEL_SPEEDUP if faster is None else faster,
                "slowest": min((check.kernel_speedup.estimate or 1.0 for _, check in checks), default=1.0),
                "measured": _points(checks),
            },
            table=_table(material, checks),
            caption=_CAPTION,
        )
    )
    return Section("amdahl", _TITLE, _QUESTION, _finding(material, start), tuple(blocks))


def _start(material: Material, checks: list[tuple[Point, AmdahlCheck]]) -> tuple[Point, AmdahlCheck] | None:
    """The headline's own point and path where it was timed."""
    point = material.headline_point
    arm = material.headline_arm(point) if point else None
    own = (pair for pair in checks if pair[0] is point and pair[1].path == arm)
    return next(own, checks[-1] if checks else None)


def _refusal(material: Material, refusals: list[tuple[Point, str]]) -> str:
    """Why the headline's point has none, and of how many others the same holds."""
    if not refusals:
        return "no path was measured beside stock"
    point, why = next((pair for pair in refusals if pair[0] is material.headline_point), refusals[-1])
    others = len({id(p) for p, _ in refusals}) - 1
    more = f"; {count(others, 'other point')} likewise" if others else ""
    return f"at {material.point_label(point)}: {why}{more}"


def _finding(material: Material, start: tuple[Point, AmdahlCheck] | None) -> str:
    if start is None:
        return "Attention was timed neither in the server nor beside it, so the prediction below is not about this run."
    point, check = start
    share, faster = check.share.estimate or 0.0, check.kernel_speedup.estimate or 1.0
    beside = ", by kernel records" if check.is_derived else ""
    return (
        f"At {material.point_label(point)}, {check.basis} was {percent(share)} of a stock step and {check.path} "
        f"made it {ratio(faster, 1)} faster{beside}: that predicts {ratio(check.predicted.estimate)} for the step; "
        f"measured was {ratio(check.measured.estimate)}. However fast that part becomes, the step stays below "
        f"{ratio(amdahl.limit(share))}."
    )


def _points(checks: list[tuple[Point, AmdahlCheck]]) -> list[Json]:
    traces: dict[str, Json] = {}
    for _, check in checks:
        trace = traces.setdefault(
            check.path,
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"measured, {check.path}",
                "x": [],
                "y": [],
                "marker": {"color": f"${path_of(check.path)}", "size": 10, "symbol": SYMBOLS.get(check.path, "circle")},
                "error_y": {"type": "data", "symmetric": False, "array": [], "arrayminus": []},
                "hovertemplate": "s %{x:.1f}×: measured %{y:.2f}×",
            },
        )
        trace["x"].append(check.kernel_speedup.estimate)
        trace["y"].append(check.measured.estimate)
        up, down = error_bar(check.measured)
        trace["error_y"]["array"].append(up)
        trace["error_y"]["arrayminus"].append(down)
    return list(traces.values())


def _table(material: Material, checks: list[tuple[Point, AmdahlCheck]]) -> Table:
    return cells.table(
        "amdahl-data",
        "Share, kernel speed-up, prediction and measurement",
        ("point", "path", "share of what", "f", "s", "predicted", "measured", "95% interval", "contradiction", "from"),
        [
            [
                cells.text(material.point_label(point)),
                cells.path(check.path),
                cells.text(check.basis),
                cells.amount(check.share.estimate, check.share.note, percent),
                cells.amount(check.kernel_speedup.estimate, check.kernel_speedup.note, ratio),
                cells.amount(check.predicted.estimate, check.predicted.note, ratio),
                cells.amount(check.measured.estimate, check.measured.note, ratio),
                cells.interval(check.measured.low, check.measured.high, check.measured.note, ratio),
                cells.text(check.contradiction or ""),
                cells.text(check.origin),
            ]
            for point, check in checks
        ],
    )
