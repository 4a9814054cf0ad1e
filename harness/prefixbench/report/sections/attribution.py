"""Where the gain comes from: the waterfall of the headline point in three yardsticks, and the shares everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.attribution import YARDSTICKS, Attribution, Rung, Yardstick, attribute, shapley
from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import mean_interval
from prefixbench.report import bars, cells, figures
from prefixbench.report.material import LADDER, WITH_PLUGIN, Material
from prefixbench.report.view import Block, Cell, Chart, Note, Section, Switch, Table
from prefixbench.report.words import number, percent, span

_TITLE, _QUESTION = "Where the gain comes from", "How much is due to reading once, how much to the layout?"
# How each yardstick is drawn: axis title, and the factor from the analysis' unit to the one shown.
_DRAWN: dict[Yardstick, tuple[str, str, float]] = {
    "throughput": ("Tokens per second", "decode tokens per second", 1.0),
    "time per token": ("Time per token", "ms per token of the whole batch", 1e3),
    "log": ("Logarithm", "ln(tokens per second)", 1.0),
}


def ladder(material: Material, point: Point) -> list[Rung]:
    """The measured rungs from stock upwards; stock means the baseline of the point."""
    baseline = material.baseline(point)
    arms = [arm for arm in (baseline, *LADDER[1:]) if arm and material.sample(point, arm)]
    return [material.rung(point, arm) for arm in arms]


def attribution_section(material: Material) -> Section:
    able = [(point, rungs) for point in material.points if len(rungs := ladder(material, point)) > 2]
    if not able:
        reason = "a share needs stock and at least two other paths measured at the same point"
        return Section("attribution", _TITLE, _QUESTION, "No share is given.", (Note("missing", f"{reason}."),))
    chosen = next((pair for pair in able if pair[0] is material.headline_point), able[-1])
    point, rungs = chosen
    results: dict[Yardstick, Attribution] = {yardstick: attribute(rungs, yardstick) for yardstick in YARDSTICKS}
    drawn = tuple((_DRAWN[name][0], _waterfall(material, point, rungs, result)) for name, result in results.items())
    blocks: list[Block] = [
        Switch("yardstick", "Yardstick", drawn),
        *(Note("warning", text) for arm in LADDER[1:] if (text := material.inactive(point, arm))),
        *_shapley(material, point, rungs),
        _everywhere(material, able),
    ]
    return Section("attribution", _TITLE, _QUESTION, _finding(material, point, results), tuple(blocks))


def _finding(material: Material, point: Point, results: dict[Yardstick, Attribution]) -> str:
    where = f"At {material.point_label(point)}"
    first = results["throughput"].shares[0]
    if first.share.estimate is None:
        return f"{where} no share is given: {first.share.note}."
    interval = span(first.share.low, first.share.high, "{:.1%}")
    parts = [f"{where}, {first.path} brings {percent(first.share.estimate)} of the gain"]
    parts.append(f" ({interval})" if interval else " (one launch, no interval)")
    parts.append(", counted in tokens per second")
    other = results["time per token"].shares[0].share.estimate
    if other is not None:
        parts.append(f"; {percent(other)} when counted in time per token")
    return "".join(parts) + "."


def _waterfall(material: Material, point: Point, rungs: Sequence[Rung], result: Attribution) -> Chart:
    _, unit, factor = _DRAWN[result.yardstick]
    scale = YARDSTICKS[result.yardstick]
    levels = [mean_interval([scale(value) * factor for value in rung.tok_s.values()]) for rung in rungs]
    at = [level.estimate or 0.0 for level in levels]
    steps = [bars.Step("stock", "stock", 0.0, at[0], levels[0].low, levels[0].high, number(at[0]))]
    for index, share in enumerate(result.shares, start=1):
        text = percent(share.share.estimate) if share.share.estimate is not None else "no share"
        level = levels[index]
        steps.append(bars.Step(f"{share.path} adds", share.path, at[index - 1], at[index], level.low, level.high, text))
    steps.append(bars.Step(result.top, result.top, 0.0, at[-1], levels[-1].low, levels[-1].high, number(at[-1])))
    said = ", ".join(f"{s.path} {percent(s.share.estimate)}" for s in result.shares if s.share.estimate is not None)
    slug = result.yardstick.replace(" ", "-")
    return Chart(
        id=f"attribution-{slug}",
        title=f"From stock to {result.top}, at {material.point_label(point)}",
        alt=f"Waterfall in {unit}: stock {number(at[0])}, {result.top} {number(at[-1])}. Shares: {said or 'none'}.",
        figure=bars.waterfall(steps, figures.Axis(unit)),
        table=_share_table(result, f"attribution-{slug}-data"),
        caption=result.refusal
        or "Each rung is credited with what it adds to the one below it, so shares depend on the order of the ladder.",
    )


def _share_table(result: Attribution, name: str) -> Table:
    return cells.table(
        name,
        f"Shares of the gain of {result.top} over {result.baseline}, yardstick: {result.yardstick}",
        ("path", "added to", "share", "95% interval", "its kernels ran on", "method"),
        [
            [
                cells.path(share.path),
                cells.path(share.below),
                *_share_cells(share.share.estimate, share.share.low, share.share.high, share.share.note),
                cells.amount(share.active_share, "no kernel of its own, or no counters", percent),
                cells.text(share.share.method),
            ]
            for share in result.shares
        ],
    )


def _share_cells(estimate: float | None, low: float | None, high: float | None, note: str | None) -> list[Cell]:
    return [cells.amount(estimate, note, percent), cells.interval(low, high, note, percent)]


def _shapley(material: Material, point: Point, rungs: Sequence[Rung]) -> list[Block]:
    """The split that does not depend on an order, from every path measured here; none when paths did not run."""
    samples = {rung.path: rung.tok_s for rung in rungs} | {
        arm: material.sample(point, arm) for arm in point.arms if arm not in (WITH_PLUGIN, "stock")
    }
    split = shapley(samples)
    if split is None or attribute(rungs).refusal:
        return []
    if split.orders_used == 1:
        return [Note("info", f"A split that does not depend on the order cannot be given: {split.note}.")]
    rows = [[cells.text(name), cells.amount(share, say=percent)] for name, share in split.shares.items()]
    caption = f"The same gain split over orders (Shapley), in tokens per second; {split.note}"
    return [cells.table("shapley", caption, ("ingredient", "share"), rows)]


def _everywhere(material: Material, able: Sequence[tuple[Point, list[Rung]]]) -> Table:
    rows = []
    for point, rungs in able:
        by_yardstick = [attribute(rungs, yardstick) for yardstick in YARDSTICKS]
        for index, share in enumerate(by_yardstick[0].shares):
            rows.append(
                [
                    cells.text(material.point_label(point)),
                    cells.path(share.path),
                    *_share_cells(share.share.estimate, share.share.low, share.share.high, share.share.note),
                    *(
                        cells.amount(other.shares[index].share.estimate, other.shares[index].share.note, percent)
                        for other in by_yardstick[1:]
                    ),
                ]
            )
    columns = ("point", "path", "share, tokens/s", "95% interval", "share, time per token", "share, log")
    return cells.table("attribution-everywhere", "Shares at every point of the sweep", columns, rows, folded=True)
