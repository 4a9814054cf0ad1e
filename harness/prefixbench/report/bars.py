"""Bars and tiles: comparisons over names instead of over a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixbench.analysis.stats import Interval
from prefixbench.report.figures import Axis, axis, error_bar, plain
from prefixbench.report.view import Figure, Json

_MOST_UPRIGHT = 6


def _names(labels: Sequence[str]) -> Json:
    """An axis of names: level while they have room, aslant where there are many."""
    return {"type": "category", "tickangle": 0 if len(labels) <= _MOST_UPRIGHT else -40}


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
        return f"{plain(self.label)}<br><b>{self.text}</b>"


def waterfall(steps: Sequence[Step], y: Axis) -> Figure:
    """Bars from start to end. The stock bar starts at zero; each further bar is what a step adds or takes away."""
    data: list[Json] = [
        {
            "type": "bar",
            "x": [step.tick],
            "base": [step.start],
            "y": [step.end - step.start],
            "name": plain(step.label),
            "marker": {"color": f"${step.path}"},
            "showlegend": False,
            "width": 0.6,
            "hovertemplate": f"{step.text}<extra>{plain(step.label)}</extra>",
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
    return {"data": data, "layout": {"xaxis": _names([step.tick for step in steps]), "yaxis": axis(y), "bargap": 0.4}}


def shares(labels: Sequence[str], paths: Sequence[str], values: Sequence[Sequence[float | None]], x: Axis) -> Figure:
    """Horizontal stacked bars, one per label; `values[i][j]` is the share of `paths[j]` in `labels[i]`."""
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(labels),
            "x": [row[j] for row in values],
            "name": plain(path),
            "marker": {"color": f"${path}"},
            "hovertemplate": f"%{{x:.1%}}<extra>{plain(path)}</extra>",
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


def bars(labels: Sequence[str], paths: Sequence[str], values: Sequence[Interval], y: Axis) -> Figure:
    """One bar for each label in its path's colour, with an error bar where there is an interval."""
    errors = [error_bar(value) for value in values]
    data: Json = {
        "type": "bar",
        "x": [plain(label).replace(", ", "<br>") for label in labels],
        "y": [value.estimate for value in values],
        "marker": {"color": [f"${path}" for path in paths]},
        "error_y": {"type": "data", "symmetric": False, "color": "$ink", "thickness": 1.5, "width": 8}
        | {"array": [up for up, _ in errors], "arrayminus": [down for _, down in errors]},
        "hovertemplate": "%{x}: %{y:,.4~g}<extra></extra>",
    }
    layout: Json = {
        "xaxis": _names(labels),
        "yaxis": axis(y),
        "bargap": 0.45,
        "showlegend": False,
    }
    return {"data": [data], "layout": layout}


def grouped_bars(labels: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]], y: Axis) -> Figure:
    """Bars side by side; groups differ in shade, from ink to muted, since colour already means a path."""
    shades = ("$ink", "$muted", "$line")
    data: list[Json] = [
        {
            "type": "bar",
            "name": name,
            "x": [plain(label).replace(", ", "<br>") for label in labels],
            "y": list(values),
            "marker": {"color": shades[i % len(shades)], "line": {"color": "$muted", "width": 1}},
            "hovertemplate": f"%{{x}}: %{{y:,.4~s}}B<extra>{name}</extra>",
        }
        for i, (name, values) in enumerate(groups)
    ]
    layout: Json = {"xaxis": _names(labels), "yaxis": axis(y), "barmode": "group", "bargap": 0.35}
    return {"data": data, "layout": layout}


@dataclass(frozen=True)
class Tile:
    """One tile of the dispatcher's map; `outlined` marks what a rule would send to dense."""

    x: str
    y: str
    path: str
    text: str
    hover: str
    outlined: bool


def tile_map(tiles: Sequence[Tile], x: Axis, y: Axis, meaning: str = "fastest", row_height: int = 44) -> Figure:
    """Tiles on two categorical axes, coloured by path (`meaning` says of what); empty where nothing was measured.

    The tiles are shapes, so that they fill their place at any width; a trace of each path carries text and hover.
    """
    xs, ys = (list(dict.fromkeys(values)) for values in ([t.x for t in tiles], [t.y for t in tiles]))
    shapes: list[Json] = [
        {"type": "rect", "layer": "below", "fillcolor": f"${tile.path}"}
        | {"x0": xs.index(tile.x) - 0.47, "x1": xs.index(tile.x) + 0.47}
        | {"y0": ys.index(tile.y) - 0.45, "y1": ys.index(tile.y) + 0.45}
        | {"line": {"color": "$ink", "width": 3 if tile.outlined else 0}}
        for tile in tiles
    ]
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": f"{path} {meaning}",
            "x": [tile.x for tile in tiles if tile.path == path],
            "y": [tile.y for tile in tiles if tile.path == path],
            "text": [tile.text for tile in tiles if tile.path == path],
            "textfont": {"color": "$page", "size": 12},
            "customdata": [plain(tile.hover) for tile in tiles if tile.path == path],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {"symbol": "square", "size": row_height / 2, "color": f"${path}"},
        }
        for path in dict.fromkeys(tile.path for tile in tiles)
    ]
    fixed: dict[str, Json] = {"type": "category", "categoryorder": "array", "showgrid": False, "zeroline": False}
    layout: dict[str, Json] = {
        "height": 120 + row_height * len(ys),
        "shapes": shapes,
        "xaxis": axis(x) | fixed | {"categoryarray": xs, "range": [-0.5, len(xs) - 0.5]},
        "yaxis": axis(y) | fixed | {"categoryarray": ys, "range": [-0.5, len(ys) - 0.5]},
        "legend": {"itemsizing": "constant"},
    }
    return {"data": data, "layout": layout}


@dataclass(frozen=True)
class Change:
    """A relative change with its interval; `colour` is the role of its verdict."""

    metric: str
    case: str
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
            "y": [f"{plain(row.metric)}<br>{plain(row.case)}"],
            "showlegend": False,
            "marker": {"color": f"${row.colour}", "size": 9},
            "error_x": {"type": "data", "symmetric": False, "color": f"${row.colour}", "thickness": 1.5, "width": 4}
            | {
                "array": [None if row.high is None else row.high - row.change],
                "arrayminus": [None if row.low is None else row.change - row.low],
            },
            "hovertemplate": f"%{{x:+.1%}}<extra>{plain(row.metric)}</extra>",
        }
        for row in rows
    ]
    lines: list[Json] = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}
        | {"line": {"color": "$ink", "width": 1, "dash": dash}}
        for at, dash in ((0.0, "solid"), (margin, "dot"))
    ]
    layout: dict[str, Json] = {
        "height": 90 + 34 * len(rows),
        "shapes": lines,
        "xaxis": {"title": {"text": "change"}, "tickformat": "+.0%"},
        "yaxis": {"type": "category", "autorange": "reversed"},
    }
    return {"data": data, "layout": layout}
