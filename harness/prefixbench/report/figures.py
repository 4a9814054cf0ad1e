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


@dataclass(frozen=True)
class Axis:
    title: str
    log: bool = False
    suffix: str = ""
    ticks: tuple[float, ...] = ()
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
        "mode": "lines+markers",
        "name": _plain(one.name),
        "x": [p.x for p in one.points],
        "y": [p.y for p in one.points],
        "connectgaps": False,
        "line": {"color": f"${one.path}", "width": 2.5, "dash": one.dash},
        "marker": {"color": f"${one.path}", "size": 9, "symbol": SYMBOLS.get(one.path, "circle")},
        "error_y": {"type": "data", "array": up, "arrayminus": down, "symmetric": False}
        | {"color": f"${one.path}", "thickness": 1.5, "width": 5},
        "hovertemplate": f"%{{x:,}}: %{{y:,.4~g}}{y.suffix}<extra>{_plain(one.name)}</extra>",
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
        "hovertemplate": f"%{{x:,}}: %{{y:,.4~g}}{y.suffix}<extra>one launch, {_plain(one.name)}</extra>",
    }


def _level_shapes(level: float) -> list[Json]:
    return [
        {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": 0, "y1": level, "layer": "below"}
        | {"fillcolor": "$zone", "line": {"width": 0}},
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": level, "y1": level}
        | {"line": {"color": "$ink", "width": 1, "dash": "dot"}},
    ]


@dataclass(frozen=True)
class Step:
    """One bar of a waterfall: from `start` to `end`; an interval belongs to its end."""

    label: str
    path: str
    start: float
    end: float
    low: float | None = None
    high: float | None = None
    text: str = ""

    @property
    def tick(self) -> str:
        """The label under the bar: what it is, and its figure below."""
        return f"{_plain(self.label)}<br><b>{self.text}</b>"


def waterfall(steps: Sequence[Step], y: Axis) -> Figure:
    """Bars from start to end. The stock bar starts at zero; each further bar is what a step adds or takes away."""
    data: list[Json] = [
        {
            "type": "bar",
            "x": [step.tick],
            "base": [step.start],
            "y": [step.end - step.start],
            "name": _plain(step.label),
            "marker": {"color": f"${step.path}"},
            "showlegend": False,
            "width": 0.6,
            "hovertemplate": f"{step.text}<extra>{_plain(step.label)}</extra>",
        }
        for step in steps
    ]
    data += [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [step.tick],
            "y": [step.end],
            "showlegend": False,
            "hoverinfo": "skip",
            "marker": {"size": 1, "color": "$ink"},
            "error_y": {"type": "data", "symmetric": False, "color": "$ink", "thickness": 1.5, "width": 8}
            | {"array": [step.high - step.end], "arrayminus": [step.end - step.low]},
        }
        for step in steps
        if step.low is not None and step.high is not None
    ]
    return {"data": data, "layout": {"xaxis": {"type": "category"}, "yaxis": axis(y), "bargap": 0.4}}


def shares(labels: Sequence[str], paths: Sequence[str], values: Sequence[Sequence[float | None]], x: Axis) -> Figure:
    """Horizontal stacked bars, one per label; `values[i][j]` is the share of `paths[j]` in `labels[i]`."""
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(labels),
            "x": [row[j] for row in values],
            "name": _plain(path),
            "marker": {"color": f"${path}"},
            "hovertemplate": f"%{{x:.1%}}<extra>{_plain(path)}</extra>",
        }
        for j, path in enumerate(paths)
    ]
    layout: dict[str, Json] = {
        "barmode": "stack",
        "bargap": 0.35,
        "height": 120 + 24 * len(labels),
        "legend": {"traceorder": "normal"},
        "xaxis": axis(x) | {"range": [0, 1], "tickformat": ".0%"},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return {"data": data, "layout": layout}


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
        built |= {"tickvals": list(spec.ticks), "ticktext": [f"{value:,.10g}" for value in spec.ticks]}
    return built


def _plain(text: str) -> str:
    """Plotly reads a few HTML tags and %{...} in texts; names from records must stay text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")


def bars(labels: Sequence[str], paths: Sequence[str], values: Sequence[Interval], y: Axis) -> Figure:
    """One bar for each label in its path's colour, with an error bar where there is an interval."""
    errors = [error_bar(value) for value in values]
    data: Json = {
        "type": "bar",
        "x": [_plain(label) for label in labels],
        "y": [value.estimate for value in values],
        "marker": {"color": [f"${path}" for path in paths]},
        "error_y": {"type": "data", "symmetric": False, "color": "$ink", "thickness": 1.5, "width": 8}
        | {"array": [up for up, _ in errors], "arrayminus": [down for _, down in errors]},
        "hovertemplate": "%{x}: %{y:,.4~g}<extra></extra>",
    }
    layout: Json = {"xaxis": {"type": "category"}, "yaxis": axis(y), "bargap": 0.45, "showlegend": False}
    return {"data": [data], "layout": layout}


def grouped_bars(labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]], y: Axis) -> Figure:
    """Bars side by side; groups differ in shade, from ink to muted, since colour already means a path."""
    shades = ("$ink", "$muted", "$line")
    data: list[Json] = [
        {
            "type": "bar",
            "name": name,
            "x": [_plain(label) for label in labels],
            "y": list(values),
            "marker": {"color": shades[i % len(shades)], "line": {"color": "$muted", "width": 1}},
            "hovertemplate": f"%{{x}}: %{{y:,.4~s}}B<extra>{name}</extra>",
        }
        for i, (name, values) in enumerate(groups)
    ]
    layout: Json = {"xaxis": {"type": "category"}, "yaxis": axis(y), "barmode": "group", "bargap": 0.35}
    return {"data": data, "layout": layout}


@dataclass(frozen=True)
class Cell:
    """One cell of the dispatcher's map; `outlined` marks what a rule would send to dense."""

    x: str
    y: str
    path: str | None
    text: str
    hover: str
    outlined: bool


def cell_map(rows: Sequence[Cell], x: Axis, y: Axis) -> Figure:
    """Squares on two categorical axes, coloured by path; empty where nothing was measured."""
    xs, ys = (list(dict.fromkeys(values)) for values in ([c.x for c in rows], [c.y for c in rows]))
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": f"{path} fastest",
            "x": [c.x for c in rows if c.path == path],
            "y": [c.y for c in rows if c.path == path],
            "text": [c.text for c in rows if c.path == path],
            "textfont": {"color": "$surface", "size": 12},
            "customdata": [c.hover for c in rows if c.path == path],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "symbol": "square",
                "size": 42,
                "color": f"${path}",
                "line": {"color": "$ink", "width": [3 if c.outlined else 0 for c in rows if c.path == path]},
            },
        }
        for path in dict.fromkeys(c.path for c in rows)
        if path
    ]
    layout: dict[str, Json] = {
        "height": 120 + 52 * len(ys),
        "xaxis": axis(x) | {"type": "category", "categoryorder": "array", "categoryarray": xs, "showgrid": False},
        "yaxis": axis(y) | {"type": "category", "categoryorder": "array", "categoryarray": ys, "showgrid": False},
        "legend": {"itemsizing": "constant"},
    }
    return {"data": data, "layout": layout}


@dataclass(frozen=True)
class Change:
    """A relative change with its interval; `colour` is the role of its verdict."""

    label: str
    change: float
    low: float | None
    high: float | None
    colour: str


def changes(rows: Sequence[Change], margin: float) -> Figure:
    """A forest plot: one line for each metric, zero and the tolerated regression marked."""
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [row.change],
            "y": [_plain(row.label)],
            "showlegend": False,
            "marker": {"color": f"${row.colour}", "size": 9},
            "error_x": {"type": "data", "symmetric": False, "color": f"${row.colour}", "thickness": 1.5, "width": 4}
            | {
                "array": [None if row.high is None else row.high - row.change],
                "arrayminus": [None if row.low is None else row.change - row.low],
            },
            "hovertemplate": f"%{{x:+.1%}}<extra>{_plain(row.label)}</extra>",
        }
        for row in rows
    ]
    lines: list[Json] = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}
        | {"line": {"color": "$ink", "width": 1, "dash": dash}}
        for at, dash in ((0.0, "solid"), (margin, "dot"))
    ]
    layout: dict[str, Json] = {
        "height": 90 + 24 * len(rows),
        "shapes": lines,
        "xaxis": {"title": {"text": "change"}, "tickformat": "+.0%"},
        "yaxis": {"type": "category", "autorange": "reversed"},
    }
    return {"data": data, "layout": layout}
