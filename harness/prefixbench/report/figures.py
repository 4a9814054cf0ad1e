"""Plotly figures as plain JSON. Colours are `$role` tokens: the page resolves them for its current theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixbench.analysis.stats import Interval
from prefixbench.report.view import Figure, Json

SYMBOLS = {
    "stock": "circle",
    "paged": "triangle-up",
    "cascade": "square",
    "dense": "star",
    "full": "diamond",
    "auto": "cross",
}


@dataclass(frozen=True)
class Point:
    """A mean with its interval (None: there is none) and the launches behind it. A None `y` is drawn as a gap."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    raw: tuple[float, ...] = ()


@dataclass(frozen=True)
class Series:
    """One line. `path` gives colour and marker; `dash` tells two lines of one path apart."""

    name: str
    path: str
    points: tuple[Point, ...]
    dash: str = "solid"
    marks: bool = True


@dataclass(frozen=True)
class Axis:
    title: str
    log: bool = False
    suffix: str = ""
    ticks: tuple[float, ...] = ()
    tick_texts: tuple[str, ...] = ()
    from_zero: bool = True


def lines(series: Sequence[Series], x: Axis, y: Axis, *, level: float | None = None, level_name: str = "") -> Figure:
    """Means with error bars over the raw points; `level` draws a line and shades what lies below it."""
    data: list[Json] = []
    for one in series:
        data += [_raw(one, y), _means(one, y)]
    layout: dict[str, Json] = {"xaxis": axis(x), "yaxis": axis(y)}
    if level is not None:
        layout["shapes"] = _level_shapes(level)
        layout["annotations"] = [
            {"x": 0.01, "xref": "paper", "xanchor": "left", "y": 0, "yanchor": "bottom", "showarrow": False}
            | {"text": level_name, "font": {"size": 12, "color": "$muted"}}
        ]
    return {"data": data, "layout": layout}


def _means(one: Series, y: Axis) -> dict[str, Json]:
    up = [None if p.y is None or p.high is None else p.high - p.y for p in one.points]
    down = [None if p.y is None or p.low is None else p.y - p.low for p in one.points]
    return {
        "type": "scatter",
        "mode": "lines+markers" if one.marks else "lines",
        "name": plain(one.name),
        "x": [p.x for p in one.points],
        "y": [p.y for p in one.points],
        "connectgaps": False,
        "line": {"color": f"${one.path}", "width": 2.5, "dash": one.dash},
        "marker": {"color": f"${one.path}", "size": 9, "symbol": SYMBOLS.get(one.path, "circle")},
        "error_y": {"type": "data", "array": up, "arrayminus": down, "symmetric": False}
        | {"color": f"${one.path}", "thickness": 1.5, "width": 5},
        "hovertemplate": f"%{{x:,}}: %{{y:,.4~g}}{y.suffix}<extra>{plain(one.name)}</extra>",
    }


def _raw(one: Series, y: Axis) -> dict[str, Json]:
    pairs = [(p.x, value) for p in one.points for value in p.raw]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{one.name}, single launches",
        "showlegend": False,
        "x": [x for x, _ in pairs],
        "y": [value for _, value in pairs],
        "marker": {"color": f"${one.path}", "size": 5, "opacity": 0.45, "symbol": SYMBOLS.get(one.path, "circle")},
        "hovertemplate": f"%{{x:,}}: %{{y:,.4~g}}{y.suffix}<extra>one launch, {plain(one.name)}</extra>",
    }


def _level_shapes(level: float) -> list[Json]:
    return [
        {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": 0, "y1": level, "layer": "below"}
        | {"fillcolor": "$zone", "line": {"width": 0}},
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": level, "y1": level}
        | {"line": {"color": "$ink", "width": 1, "dash": "dot"}},
    ]


def error_bar(interval: Interval) -> tuple[float | None, float | None]:
    """Lengths above and below the estimate; None where there is no interval."""
    if interval.estimate is None or interval.low is None or interval.high is None:
        return None, None
    return interval.high - interval.estimate, interval.estimate - interval.low


def axis(spec: Axis) -> dict[str, Json]:
    built: dict[str, Json] = {"title": {"text": spec.title}, "ticksuffix": spec.suffix}
    if spec.log:
        built["type"] = "log"
    elif spec.from_zero:
        built["rangemode"] = "tozero"
    if spec.ticks:
        built |= {
            "tickvals": list(spec.ticks),
            "ticktext": list(spec.tick_texts) or [f"{value:,.10g}" for value in spec.ticks],
        }
    return built


def plain(text: str) -> str:
    """Plotly reads a few HTML tags and %{...} in texts; names from records must stay text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
