"""Throughput, speed-up and time per token by prefix length: means with intervals over the single launches."""

from __future__ import annotations

from collections.abc import Callable

from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import Interval
from prefixbench.report import cells, figures
from prefixbench.report.material import WITH_PLUGIN, Family, Material, path_of
from prefixbench.report.sections.clocks import clock_blocks
from prefixbench.report.sections.watching import watching_blocks
from prefixbench.report.view import Block, Cell, Chart, Note, Section, Switch, Table
from prefixbench.report.words import number, ratio, span

_TITLE, _QUESTION = "Results", "How much faster is it, and where is it slower?"


def results_section(material: Material) -> Section:
    families = material.families
    if not families:
        reason = "no serving record of this selection has a measurement"
        return Section("results", _TITLE, _QUESTION, "Nothing was measured.", (Note("missing", f"{reason}."),))
    blocks: list[Block] = [
        *_switched("throughput", "Requests", [(f.label, _throughput(material, f, i)) for i, f in enumerate(families)]),
        *_switched("speedup", "Requests", [(f.label, _speedups(material, f, i)) for i, f in enumerate(families)]),
        *_switched("tpot", "Requests", [(f.label, _tpot(material, f, i)) for i, f in enumerate(families)]),
        *clock_blocks(material),
        *watching_blocks(material.evidence.records),
    ]
    return Section("results", _TITLE, _QUESTION, _finding(material), tuple(blocks))


def _switched(name: str, label: str, charts: list[tuple[str, Chart]]) -> list[Block]:
    return [charts[0][1]] if len(charts) == 1 else [Switch(name, label, tuple(charts), group="family")]


def speedups(material: Material) -> list[tuple[Point, str, Interval]]:
    """Every path of ours against the baseline, at every point where both exist."""
    return [
        (point, arm, gain)
        for point in material.points
        for arm in point.arms
        if path_of(arm) != "stock" and (gain := material.speedup(point, arm)) and gain.estimate is not None
    ]


def _finding(material: Material) -> str:
    found = speedups(material)
    if not found:
        return "No speed-up can be given: stock and another path were not both measured at any point."
    best = max(found, key=lambda item: item[2].estimate or 0.0)
    worst = min(found, key=lambda item: item[2].estimate or 0.0)
    slower = sum(interval.high is not None and interval.high < 1 for _, _, interval in found)
    text = f"From {_say(material, worst)} to {_say(material, best)}. "
    if slower:
        return text + f"{slower} of {len(found)} combinations are slower than stock beyond doubt."
    return text + f"None of {len(found)} combinations is slower than stock beyond doubt."


def _say(material: Material, item: tuple[Point, str, Interval]) -> str:
    point, arm, gain = item
    interval = span(gain.low, gain.high)
    return f"{ratio(gain.estimate)}{f' ({interval})' if interval else ''} for {arm} at {material.point_label(point)}"


def _throughput(material: Material, family: Family, index: int) -> Chart:
    def mean(point: Point, arm: str) -> Interval:
        return material.mean(point, arm)

    columns = ("shared prefix", "path", "tokens/s", "95% interval", "single launches", "realized batch", "beware")
    rows = [
        [
            *_row_head(point, arm),
            *_estimate(material, point, arm, "decode_tok_s", mean(point, arm)),
            _raw(material, point, arm, "decode_tok_s"),
            _batch(point, arm),
            cells.text(material.advice(point, arm) or ""),
        ]
        for point in family.points
        for arm in family.arms
    ]
    return Chart(
        id=f"throughput-{index}",
        title="Decode throughput by shared prefix",
        alt=_alt(f"Decode tokens per second against prefix length, {family.label}", family, mean, "tokens per second"),
        figure=figures.lines(
            _series(family, mean, lambda point, arm: tuple(material.sample(point, arm).values())),
            _prefix_axis(family),
            figures.Axis("decode tokens per second"),
        ),
        table=_table(f"throughput-{index}-data", f"Decode throughput, {family.label}", columns, rows),
        caption="Bars: 95% interval over launches. Small marks: single launches. First tokens and prefill left out.",
    )


def _speedups(material: Material, family: Family, index: int) -> Chart:
    def gain(point: Point, arm: str) -> Interval | None:
        return material.speedup(point, arm)

    arms = [arm for arm in family.arms if arm != "stock"]
    rows = []
    for point in family.points:
        for arm in arms:
            interval = gain(point, arm)
            why = "stock was not measured" if material.sample(point, arm) else material.why_missing(point, arm)
            value = interval.estimate if interval else None
            rows.append(
                [
                    *_row_head(point, arm),
                    cells.amount(value, interval.note or why if interval else why, ratio),
                    _interval(interval, why, ratio),
                    cells.text(interval.method if interval else ""),
                ]
            )
    return Chart(
        id=f"speedup-{index}",
        title="Speed-up over unmodified SGLang",
        alt=_alt(f"Speed-up against prefix length, {family.label}", family, gain, "times stock"),
        figure=figures.lines(
            _series(family, gain, lambda point, arm: _paired(material, point, arm), arms),
            _prefix_axis(family),
            figures.Axis("times stock throughput", suffix="×"),
            level=1.0,
            level_name="slower than stock",
        ),
        table=_table(
            f"speedup-{index}-data",
            f"Speed-up over stock, {family.label}",
            ("shared prefix", "path", "times stock", "95% interval", "method"),
            rows,
        ),
        caption="The shaded zone is where a path costs more than it saves: short prefixes, few requests.",
    )


def _tpot(material: Material, family: Family, index: int) -> Chart:
    def mean(point: Point, arm: str) -> Interval:
        return material.mean(point, arm, "tpot_ms")

    columns = ("shared prefix", "path", "ms/token", "95% interval", "first token ms", "tokens/s with prefill")
    rows = [
        [
            *_row_head(point, arm),
            *_estimate(material, point, arm, "tpot_ms", mean(point, arm)),
            *(
                _estimate(material, point, arm, name, material.mean(point, arm, name))[0]
                for name in ("ttft_ms", "end_to_end_tok_s")
            ),
        ]
        for point in family.points
        for arm in family.arms
    ]
    return Chart(
        id=f"tpot-{index}",
        title="Time per output token, as one request sees it",
        alt=_alt(f"Milliseconds per output token against prefix length, {family.label}", family, mean, "ms"),
        figure=figures.lines(
            _series(family, mean, lambda point, arm: tuple(material.sample(point, arm, "tpot_ms").values())),
            _prefix_axis(family),
            figures.Axis("ms per output token"),
        ),
        table=_table(f"tpot-{index}-data", f"Time per output token, {family.label}", columns, rows),
        caption="Mean over requests, first token left out. Lower is better.",
    )


def _table(name: str, caption: str, columns: tuple[str, ...], rows: list[list[Cell]]) -> Table:
    return cells.table(name, caption, columns, rows, folded=False)


def _series(
    family: Family,
    interval: Callable[[Point, str], Interval | None],
    raw: Callable[[Point, str], tuple[float, ...]],
    arms: list[str] | None = None,
) -> list[figures.Series]:
    series = []
    for arm in family.arms if arms is None else arms:
        points = []
        for point in family.points:
            found = interval(point, arm)
            x = float(str(point.key["prefix_tokens"]))
            if found is None or found.estimate is None:
                points.append(figures.Point(x, None))
            else:
                points.append(figures.Point(x, found.estimate, found.low, found.high, raw(point, arm)))
        series.append(figures.Series(arm, path_of(arm), tuple(points), "dot" if arm == WITH_PLUGIN else "solid"))
    return series


def _prefix_axis(family: Family) -> figures.Axis:
    ticks = sorted({float(str(point.key["prefix_tokens"])) for point in family.points})
    return figures.Axis("shared prefix, tokens", log=min(ticks) > 0, ticks=tuple(ticks))


def _alt(what: str, family: Family, interval: Callable[[Point, str], Interval | None], unit: str) -> str:
    """What the chart says at its right end; the table below has the rest."""
    last = family.points[-1]
    ends = [(arm, found.estimate) for arm in family.arms if (found := interval(last, arm))]
    said = ", ".join(f"{arm} {number(value)}" for arm, value in ends if value is not None)
    return f"{what}. At {int(str(last.key['prefix_tokens'])):,} tokens: {said or 'no value'} {unit}."


def _row_head(point: Point, arm: str) -> list[Cell]:
    return [cells.amount(int(str(point.key["prefix_tokens"]))), cells.path(path_of(arm), arm)]


def _estimate(material: Material, point: Point, arm: str, metric: str, found: Interval) -> list[Cell]:
    why = found.note or ""
    if found.estimate is None:
        why = material.why_missing(point, arm, metric)
    return [cells.amount(found.estimate, why), _interval(found, why, number)]


def _interval(found: Interval | None, why: str, say: Callable[[float | None], str]) -> Cell:
    if found is None:
        return cells.missing(why)
    return cells.interval(found.low, found.high, found.note or why, say)


def _raw(material: Material, point: Point, arm: str, metric: str) -> Cell:
    values = list(material.sample(point, arm, metric).values())
    return Cell(", ".join(number(value) for value in values), values)


def _paired(material: Material, point: Point, arm: str) -> tuple[float, ...]:
    """Ratios of the launches that measured both; none where stock had launches of its own."""
    baseline = material.sample(point, material.baseline(point) or "")
    return tuple(
        value / baseline[launch] for launch, value in material.sample(point, arm).items() if launch in baseline
    )


def _batch(point: Point, arm: str) -> Cell:
    realized = sorted({round(b) for b in point.rows.loc[point.rows["arm"] == arm, "realized_batch"].dropna()})
    if not realized:
        return cells.missing("no decode step was observed")
    return Cell(" to ".join(str(b) for b in dict.fromkeys((realized[0], realized[-1]))), realized[-1])
