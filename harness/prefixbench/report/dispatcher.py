"""The dispatcher against measurement: which kernel was fastest at which M_eff, and what each rule would have cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells, kernels
from prefixbench.report.figures import Axis
from prefixbench.report.kernels import Launches
from prefixbench.report.material import Material
from prefixbench.report.view import Block, Chart, Note, Section, Switch, Table
from prefixbench.report.words import count, number, path_rank, percent

REPORTED_THRESHOLD = 1024
_TITLE, _QUESTION = "Dispatcher", "From how many queries on does the dense kernel pay?"
_OURS = ("paged", "cascade", "dense")
Times = Mapping[str, float]


@dataclass(frozen=True)
class Shape:
    """One shape at which several of our kernels were timed: microseconds by kernel, and by kernel and launch."""

    prefix_tokens: int
    batch: int
    group: int
    us: Times
    us_by_launch: Mapping[str, Times]

    @property
    def m_eff(self) -> int:
        return self.batch * self.group

    @property
    def best(self) -> str:
        return min(self.us, key=lambda name: self.us[name])

    def choose(self, rule: Callable[[int], str]) -> float:
        """Microseconds of what a rule picks; the best kernel that was timed where its own was not."""
        return self.us.get(rule(self.m_eff), self.us[self.best])


def dispatcher_section(material: Material) -> Section:
    shapes = _shapes(kernels.summarize(material.kernels))
    used = {
        record.measurement.dispatch_threshold_m_eff
        for record in material.records
        if isinstance(record.measurement, ServingMeasurement) and record.measurement.dispatch_threshold_m_eff
    }
    blocks: list[Block] = []
    if used:
        text = f"The servers of this selection ran with the threshold M_eff = {', '.join(map(str, sorted(used)))}."
        blocks.append(Note("info", f"{text} M_eff is requests that share a prefix × query heads per KV head."))
    if not shapes:
        why = "no kernel record of this selection times two of our kernels on one shape (the verb kernels does)"
        blocks.append(Note("missing", f"The measured map: {why}."))
        return Section("dispatcher", _TITLE, _QUESTION, "The threshold was not measured here.", tuple(blocks))
    fitted = fit_threshold(shapes)
    prefixes = sorted({shape.prefix_tokens for shape in shapes})
    maps = [(f"{prefix:,} tokens", _map(shapes, prefix)) for prefix in prefixes]
    blocks.append(maps[0][1] if len(maps) == 1 else Switch("map", "Shared prefix", tuple(maps)))
    blocks.append(_regret(shapes, fitted))
    return Section("dispatcher", _TITLE, _QUESTION, _finding(shapes, fitted), tuple(blocks))


def _shapes(found: Sequence[Launches]) -> list[Shape]:
    """Cold L2 where it was timed, as between two layers of a model; copies of the prefix for each request left out."""
    state = "cold" if any(one.l2 == "cold" for one in found) else "warm"
    grouped: defaultdict[tuple[object, ...], dict[str, Launches]] = defaultdict(dict)
    for one in found:
        if one.implementation in _OURS and one.layout != "unique" and one.l2 == state and one.us.estimate is not None:
            key = (one.prefix_tokens, one.suffix_tokens, one.batch, one.q_heads, one.kv_heads, one.head_dim, one.dtype)
            before = grouped[key].get(one.implementation)
            if before is None or (before.us.estimate or 0) > one.us.estimate:
                grouped[key][one.implementation] = one
    return [
        Shape(
            prefix_tokens=next(iter(timed.values())).prefix_tokens,
            batch=next(iter(timed.values())).batch,
            group=next(iter(timed.values())).group,
            us={name: one.us.estimate or 0.0 for name, one in timed.items()},
            us_by_launch={name: one.us_by_launch for name, one in timed.items()},
        )
        for timed in grouped.values()
        if len(timed) > 1
    ]


def _rule(threshold: float) -> Callable[[int], str]:
    return lambda m_eff: "dense" if m_eff >= threshold else "cascade"


def best_threshold(shapes: Sequence[Shape]) -> float:
    """The M_eff from which on dense costs least time in sum; infinity when it never pays."""
    candidates = [*sorted({float(shape.m_eff) for shape in shapes}), math.inf]
    return min(candidates, key=lambda t: sum(shape.choose(_rule(t)) for shape in shapes))


@dataclass(frozen=True)
class Threshold:
    """The fitted threshold, and the lowest and highest that single launches would have given."""

    m_eff: float
    low: float
    high: float
    launches: int


def fit_threshold(shapes: Sequence[Shape]) -> Threshold | None:
    """Fitted where cascade and dense were both timed; None when they never were."""
    able = [shape for shape in shapes if {"cascade", "dense"} <= shape.us.keys()]
    if not able:
        return None
    everywhere = set.intersection(*(set(times) for shape in able for times in shape.us_by_launch.values()))
    single = [best_threshold([_of_launch(shape, launch) for shape in able]) for launch in sorted(everywhere)]
    whole = best_threshold(able)
    return Threshold(whole, min(single, default=whole), max(single, default=whole), len(single))


def _of_launch(shape: Shape, launch: str) -> Shape:
    us = {name: times[launch] for name, times in shape.us_by_launch.items()}
    return Shape(shape.prefix_tokens, shape.batch, shape.group, us, {})


def _finding(shapes: Sequence[Shape], fitted: Threshold | None) -> str:
    if fitted is None:
        return "Cascade and dense were not timed on the same shape, so no threshold can be fitted."
    where = f"measured on {count(len(shapes), 'shape')}"
    if fitted.m_eff == math.inf:
        return f"The dense kernel never paid in sum, {where}; the reported threshold is {REPORTED_THRESHOLD:,}."
    spread = (
        f"single launches give {fitted.low:,.0f} to {fitted.high:,.0f}"
        if fitted.launches > 1
        else "one launch, no spread"
    )
    return (
        f"The dense kernel pays from M_eff = {fitted.m_eff:,.0f} on, {where} ({spread}); "
        f"the reported threshold is {REPORTED_THRESHOLD:,}, fitted on another GPU."
    )


def _map(shapes: Sequence[Shape], prefix: int) -> Chart:
    own = sorted((s for s in shapes if s.prefix_tokens == prefix), key=lambda s: (s.group, s.batch))
    drawn = [
        bars.Tile(
            x=str(shape.batch),
            y=str(shape.group),
            path=shape.best,
            text=f"{shape.m_eff:,}",
            hover=f"M_eff {shape.m_eff:,}: "
            + ", ".join(f"{name} {number(us)} µs" for name, us in sorted(shape.us.items(), key=lambda i: i[1])),
            outlined=shape.m_eff >= REPORTED_THRESHOLD,
        )
        for shape in own
    ]
    wins = {name: sum(shape.best == name for shape in own) for name in sorted({s.best for s in own}, key=path_rank)}
    said = ", ".join(f"{name} fastest at {times} of {len(own)}" for name, times in wins.items())
    timed = sorted({name for shape in own for name in shape.us}, key=path_rank)
    not_timed = "this kernel was not timed on this shape"
    return Chart(
        id=f"map-{prefix}",
        title=f"Fastest kernel, {prefix:,}-token prefix",
        alt=f"Map of requests in flight against query heads per KV head: {said}.",
        figure=bars.tile_map(drawn, Axis("requests in flight"), Axis("query heads per KV head")),
        table=cells.table(
            f"map-{prefix}-data",
            f"Microseconds by kernel, {prefix:,}-token prefix",
            ("in flight", "heads per KV head", "M_eff", "fastest", *(f"{name} µs" for name in timed)),
            [
                [
                    cells.amount(shape.batch),
                    cells.amount(shape.group),
                    cells.amount(shape.m_eff),
                    cells.path(shape.best),
                    *(cells.amount(shape.us.get(name), not_timed) for name in timed),
                ]
                for shape in own
            ],
        ),
        caption=f"The number in a cell is M_eff; outlined cells are dense by the reported rule (M_eff ≥ "
        f"{REPORTED_THRESHOLD:,}). Only the colour is measured.",
    )


def _regret(shapes: Sequence[Shape], fitted: Threshold | None) -> Table:
    """How much longer each rule takes than the fastest kernel of every shape."""
    rules: list[tuple[str, Callable[[int], str]]] = [(f"always {name}", _always(name)) for name in _OURS]
    rules.append((f"reported: dense from M_eff {REPORTED_THRESHOLD:,}", _rule(REPORTED_THRESHOLD)))
    if fitted is not None:
        rules.append((f"fitted here: dense from M_eff {fitted.m_eff:,.0f}", _rule(fitted.m_eff)))
    rows = []
    for name, rule in rules:
        extra = [shape.choose(rule) / shape.us[shape.best] - 1 for shape in shapes]
        total = sum(shape.choose(rule) for shape in shapes) / sum(shape.us[shape.best] for shape in shapes) - 1
        right = sum(value == 0 for value in extra)
        rows.append(
            [
                cells.text(name),
                cells.amount(total, say=percent),
                cells.amount(max(extra), say=percent),
                cells.amount(right / len(shapes), say=percent),
            ]
        )
    columns = ("rule", "extra time in sum", "extra time at its worst shape", "shapes where it picks the fastest")
    return cells.table("regret", f"Regret of each rule over {count(len(shapes), 'shape')}", columns, rows)


def _always(name: str) -> Callable[[int], str]:
    return lambda _: name
