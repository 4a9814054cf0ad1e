"""Numerics: how far each path's log-probabilities are from stock's, beside how far stock is from itself."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.frame import device_name
from prefixbench.analysis.numerics import (
    EXCHANGES,
    FLOOR,
    LARGEST_RATIO,
    QUANTILES,
    SIGNIFICANCE,
    Agreement,
    Deviation,
    Verdict,
    verdicts,
)
from prefixbench.record import Record
from prefixbench.report import cells, figures
from prefixbench.report.figures import Axis, Point, Series
from prefixbench.report.view import Block, Cell, Chart, Note, Section, Switch, Table
from prefixbench.report.words import count, listing, path_rank, percent

_TITLE, _QUESTION = "Numerics", "Does reading the prefix once change what the model says?"
_MARKS = ("median", *(f"p{100 * q:g}" for q in QUANTILES), "largest")
_METHOD = (
    "Every path decodes the same given tokens, all requests in one batch, and the log-probability of each token is "
    "compared with that of stock in the same batch. The yardstick is stock itself: the same tokens decoded by stock in "
    "smaller batches. Counters prove that the path served every compared step. Outside is a path of which "
    f"{', '.join(_MARKS[1:-1])} or the largest difference exceeds the yardstick's by more than exchanging the two at "
    f"random, request by request, explains (p ≤ {SIGNIFICANCE:g} of {EXCHANGES} exchanges), or more than "
    f"{LARGEST_RATIO:g} times. A quantile needs five positions beyond it; less than {FLOOR:g} is rounding of the fp32 "
    "log-probabilities themselves and counts as that much."
)


def numerics_section(records: Sequence[Record]) -> Section:
    found = verdicts(records)
    if not found:
        why = "no record of this selection compares log-probabilities (the verb numerics does)"
        return Section("numerics", _TITLE, _QUESTION, "It was not measured here.", (Note("missing", f"{why}."),))
    launches = [
        [v for v in found if v.record.launch.launch_id == launch]
        for launch in dict.fromkeys(v.record.launch.launch_id for v in found)
    ]
    blocks: list[Block] = [Note("warning", text) for text in _warnings(found)]
    charts = [(_where(launch[0]), _chart(i, launch)) for i, launch in enumerate(launches) if _is_drawn(launch)]
    if charts:
        blocks.append(charts[0][1] if len(charts) == 1 else Switch("numerics-launch", "Launch", tuple(charts)))
    blocks += [_table(launches), Note("info", _METHOD)]
    return Section("numerics", _TITLE, _QUESTION, _finding(found), tuple(blocks))


def _finding(found: Sequence[Verdict]) -> str:
    judged = [(v, v.agreement) for v in found if v.agreement and not v.is_control and v.case.path != "stock"]
    if not judged:
        return "No path could be compared with stock."
    outside = sorted({v.case.path for v, _ in judged if not v.as_it_must_be}, key=path_rank)
    who = f"Outside: {listing(outside)} is" if outside else "No path is"
    furthest, agreement = max(judged, key=lambda pair: pair[1].ratio)
    figures = (
        f"largest difference {_small(agreement.path.largest)} ({furthest.case.path}) beside "
        f"{_small(agreement.noise.largest)} (stock itself) over {agreement.path.positions:,} positions"
    )
    controls = [v for v in found if v.is_control]
    if not controls:
        control = "no control was run, so nothing shows that a fault would be found"
    elif all(v.as_it_must_be for v in controls):
        control = "a planted fault was found out"
    else:
        control = "a planted fault was NOT found out"
    return f"{who} further from stock than stock in smaller batches is from itself: {figures}; {control}."


def _warnings(found: Sequence[Verdict]) -> list[str]:
    return [f"{_name(v)}, {_where(v)}: {v.why_not or v.said}." for v in found if not v.as_it_must_be]


def _is_drawn(launch: Sequence[Verdict]) -> bool:
    return not launch[0].is_control and any(v.agreement for v in launch)


def _chart(number: int, launch: Sequence[Verdict]) -> Chart:
    """Zero has no place on a logarithmic axis and is drawn as a gap."""
    judged = sorted(((v, v.agreement) for v in launch if v.agreement), key=lambda pair: path_rank(pair[0].case.path))
    noise = Series(_noise_name(judged[0][0]), "stock", _points(judged[0][1].noise), dash="dash")
    series = [noise, *(Series(_name(v), v.case.path, _points(found.path)) for v, found in judged)]
    ticks = tuple(float(i) for i in range(len(_MARKS)))
    largest = max(judged, key=lambda pair: pair[1].path.largest)
    return Chart(
        id=f"numerics-{number}",
        title="Difference of log-probabilities from stock",
        alt=(
            f"Median, high quantiles and maximum of the difference from stock, by path, beside stock's own. The "
            f"largest is {_small(largest[1].path.largest)} ({largest[0].case.path}), stock's own "
            f"{_small(judged[0][1].noise.largest)}."
        ),
        figure=figures.lines(
            series,
            Axis("of all positions", ticks=ticks, tick_texts=_MARKS, from_zero=False),
            Axis("|difference of ln p|", log=True),
        ),
        table=_table([launch], name=f"numerics-{number}-data"),
        caption=f"{_where(launch[0])}. Dashed: stock in batches of {launch[0].noise_concurrency}.",
    )


def _points(deviation: Deviation) -> tuple[Point, ...]:
    return tuple(Point(float(i), value or None) for i, value in enumerate(_figures(deviation)))


def _figures(deviation: Deviation) -> tuple[float | None, ...]:
    return (deviation.median, *deviation.quantiles, deviation.largest)


_COLUMNS = ("measured", "path", "positions", "mean", *_MARKS, "other token", "ratio", "p", "verdict")


def _table(launches: Sequence[Sequence[Verdict]], name: str = "numerics") -> Table:
    rows: list[list[Cell]] = []
    for launch in launches:
        judged = next(((v, v.agreement) for v in launch if v.agreement), None)
        if judged is not None:
            first, found = judged
            shown = _deviation_cells(found.noise)
            rows.append(
                [cells.text(_where(first)), cells.path("stock", _noise_name(first)), *shown, *[cells.BLANK] * 3]
            )
        rows += [_row(v, v.agreement) for v in sorted(launch, key=lambda v: path_rank(v.case.path))]
    caption = "|difference of natural log-probabilities| from stock in the same batch, over the same forced tokens"
    return cells.table(name, caption, _COLUMNS, rows)


def _row(verdict: Verdict, found: Agreement | None) -> list[Cell]:
    start = [cells.text(_where(verdict)), cells.path(verdict.case.path, _name(verdict))]
    if found is None:
        return [*start, *[cells.missing(verdict.why_not or verdict.said)] * (len(_COLUMNS) - len(start))]
    said = Cell(verdict.said, verdict.said, mark="reproduced" if verdict.as_it_must_be else "differs")
    ends = [cells.amount(found.ratio), cells.amount(found.p_value), said]
    return [*start, *_deviation_cells(found.path), *ends]


def _deviation_cells(deviation: Deviation) -> list[Cell]:
    too_few = f"fewer than five of {deviation.positions:,} positions lie beyond it"
    return [
        Cell(f"{deviation.positions:,}", deviation.positions),
        *(cells.amount(value, too_few, _small) for value in (deviation.mean, *_figures(deviation))),
        cells.amount(deviation.other_argmax, say=percent),
    ]


def _name(verdict: Verdict) -> str:
    return f"{verdict.case.path}, {verdict.case.fault} planted" if verdict.is_control else verdict.case.path


def _noise_name(verdict: Verdict) -> str:
    return f"stock in batches of {verdict.noise_concurrency}"


def _where(verdict: Verdict) -> str:
    case = verdict.case
    script = f"prefix {case.prefix_tokens:,}, {case.decode_tokens} tokens of {count(case.requests, 'request')}"
    dtype = case.model_settings.get("dtype")
    return f"{case.model} {dtype}, {case.stock_backend}, {script}, {device_name(verdict.record.environment)}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.3g}"
