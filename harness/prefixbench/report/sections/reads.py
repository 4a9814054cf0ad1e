"""How often the prefix is read: measured traffic over the lines N and 1, and one launch in bytes and microseconds."""

from __future__ import annotations

from collections import defaultdict

from prefixbench.analysis.dispatcher.timed_cells import STOCK_PEERS
from prefixbench.case import ServingCase
from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells, figures, kernels
from prefixbench.report.figures import Axis, Point, Series
from prefixbench.report.kernels import Launches
from prefixbench.report.material import Material
from prefixbench.report.view import Block, Cell, Chart, Figure, Note, Section
from prefixbench.report.words import bytes_si, number, path_rank, percent, ratio, role

_TITLE, _QUESTION = "Reads", "How often does one step read the shared prompt?"
_OURS = ("paged", "cascade", "dense")
_DRAWN = {*_OURS, *STOCK_PEERS}
_CLOCK_TOLERANCE = 0.05
_DECADES = tuple(10.0**power for power in range(2, 15))
_BYTES = Axis("bytes read", log=True, ticks=_DECADES, tick_texts=tuple(bytes_si(value, 1) for value in _DECADES))
_LAYOUTS = {"shared-slots": "slots", "shared-contiguous": "contiguous", "unique": "own copies"}
_DOUBLINGS = tuple(float(2**power) for power in range(13))


def reads_section(material: Material) -> Section:
    found = kernels.summarize(material.kernels)
    counted = _counted(material)
    measured = _traffic_group(found)
    blocks: list[Block] = []
    if measured:
        blocks.append(_measured_chart(measured))
    else:
        why = "no kernel record of this selection has hardware counters (they need a GPU and its profiler)"
        blocks.append(Note("missing", f"Measured traffic: {why}."))
    if counted:
        blocks.append(_counted_chart(counted))
    blocks += _one_launch(found)
    blocks += _clocks_apart(found, material)
    if found:
        caption = "One launch of each kernel: time and bytes (DRAM and L2 are different things and are not added)"
        blocks.append(kernels.launch_table("launches", caption, found, material.records))
    return Section("reads", _TITLE, _QUESTION, _finding(measured, counted), tuple(blocks))


def _clocks_apart(found: list[Launches], material: Material) -> list[Block]:
    """A warning where FlashInfer's own timing of the same launches says something else than ours."""
    ratios = [theirs for theirs in kernels.second_clock(found, material.records) if theirs is not None]
    apart = [theirs for theirs in ratios if abs(theirs - 1) > _CLOCK_TOLERANCE]
    if not apart:
        return []
    worst = max(apart, key=lambda theirs: abs(theirs - 1))
    text = f"FlashInfer's own timing is over {percent(_CLOCK_TOLERANCE, 0)} from ours at {len(apart)} of {len(ratios)}"
    return [Note("warning", f"{text} shapes that both timed, at worst {ratio(worst)} of it; the table says where.")]


class Counted:
    """What the plugin counted for one case: prefix tokens read for shared groups, and what stock would have read."""

    def __init__(self, case: ServingCase) -> None:
        self.case = case
        self.once = self.by_stock = self.bytes_saved = self.group_steps = 0

    @property
    def factor(self) -> float:
        return self.by_stock / self.once


def _counted(material: Material) -> list[Counted]:
    sums: dict[str, Counted] = {}
    for record in material.records:
        if not isinstance(record.case, ServingCase) or not isinstance(record.measurement, ServingMeasurement):
            continue
        for block in record.measurement.blocks:
            if block.counters is None or not block.counters.prefix_tokens_read_once:
                continue
            one = sums.setdefault(record.case_hash, Counted(record.case))
            one.once += block.counters.prefix_tokens_read_once
            one.by_stock += block.counters.prefix_tokens_read_by_stock
            one.bytes_saved += block.counters.bytes_saved
            one.group_steps += block.counters.group_steps
    return sorted(sums.values(), key=lambda c: (c.case.concurrency, c.case.prefix_tokens, path_rank(c.case.path)))


def _traffic_group(found: list[Launches]) -> list[Launches]:
    """The shape, but for its batch, of which hardware counters saw most batch sizes."""
    state = "cold" if any(one.l2 == "cold" for one in found) else "warm"
    groups: defaultdict[tuple[object, ...], list[Launches]] = defaultdict(list)
    for one in found:
        if one.l2 == state and one.dram_read_bytes is not None and one.prefix_bytes:
            shape = (
                one.device,
                one.prefix_tokens,
                one.suffix_tokens,
                one.q_heads,
                one.kv_heads,
                one.head_dim,
                one.dtype,
            )
            groups[shape].append(one)
    return max(groups.values(), key=lambda g: (len({one.batch for one in g}), g[0].prefix_tokens), default=[])


def _finding(measured: list[Launches], counted: list[Counted]) -> str:
    if measured:
        most = max(one.batch for one in measured)
        said = [
            f"{one.implementation} ({_layout(one.layout)}) {ratio(_reads(one, one.dram_read_bytes), 1)} from DRAM and "
            f"{ratio(_reads(one, one.l2_read_bytes), 1)} from L2"
            for one in measured
            if one.batch == most and one.implementation in _OURS and one.layout != "unique"
        ]
        return f"With {most} requests, one launch reads the prefix this often, by hardware counters: {'; '.join(said)}."
    if counted:
        best = max(counted, key=lambda c: c.factor)
        return (
            f"The plugin counted {number(best.factor)} reads by stock for each read of ours, "
            f"with {best.case.concurrency} requests in flight. That is counting, not a hardware measurement."
        )
    return "Nothing of this selection says how often the prefix was read."


def _layout(name: str) -> str:
    return _LAYOUTS.get(name, name)


def _reads(one: Launches, amount: float | None) -> float | None:
    return None if amount is None or not one.prefix_bytes else amount / one.prefix_bytes


def _theory(batches: list[int]) -> list[Series]:
    return [
        Series("N, once each", "muted", tuple(Point(b, b) for b in batches), "dot", marks=False),
        Series("1, once for all", "ink", tuple(Point(b, 1) for b in batches), "dot", marks=False),
    ]


def _reads_figure(series: list[Series], batches: list[int]) -> Figure:
    ticks = tuple(float(b) for b in batches)
    y = Axis("reads of the prefix", log=True, ticks=_DOUBLINGS)
    return figures.lines([*_theory(batches), *series], Axis("requests in flight", log=True, ticks=ticks), y)


def _measured_chart(measured: list[Launches]) -> Chart:
    series = []
    drawn = [one for one in measured if one.implementation in _DRAWN] or measured
    for name, layout in dict.fromkeys((one.implementation, one.layout) for one in drawn):
        own = [one for one in drawn if (one.implementation, one.layout) == (name, layout)]
        label = f"{name}, {_layout(layout)}"
        series += [
            Series(f"{label}, DRAM", role(name), tuple(Point(o.batch, _reads(o, o.dram_read_bytes)) for o in own)),
            Series(f"{label}, L2", role(name), tuple(Point(o.batch, _reads(o, o.l2_read_bytes)) for o in own), "dash"),
        ]
    rows: list[list[Cell]] = [
        [
            cells.amount(one.batch),
            cells.path(one.implementation),
            cells.text(one.layout),
            *(
                cells.amount(value, kernels.NO_COUNTERS, say)
                for amount in (one.dram_read_bytes, one.l2_read_bytes)
                for value, say in ((amount, bytes_si), (_reads(one, amount), number))
            ),
        ]
        for one in measured
    ]
    columns = ("requests", "kernel", "layout", "DRAM", "DRAM / prefix", "L2", "L2 / prefix")
    return Chart(
        id="reads-measured",
        title="Measured traffic of one launch, in reads of the prefix",
        alt=f"Traffic over the size of the prefix against requests, logarithmic. {_finding(measured, [])}",
        figure=_reads_figure(series, sorted({one.batch for one in measured})),
        table=cells.table("reads-data", "Hardware counters, and divided by one prefix", columns, rows),
        caption=f"{measured[0].prefix_tokens:,}-token prefix, {measured[0].q_heads}/{measured[0].kv_heads} heads, "
        f"{measured[0].device}. Dotted: theory. Queries, outputs and suffixes are in the traffic. "
        "Drawn: ours and the decode kernel that stands for stock; the table has every peer.",
    )


def _counted_chart(counted: list[Counted]) -> Chart:
    by_concurrency = {one.case.concurrency: one.factor for one in counted}
    series = [Series("stock, counted", "stock", tuple(Point(n, f) for n, f in sorted(by_concurrency.items())))]
    for path in dict.fromkeys(one.case.path for one in counted):
        own = sorted({one.case.concurrency for one in counted if one.case.path == path})
        series.append(Series(f"{path}, counted", path, tuple(Point(n, 1) for n in own)))
    rows: list[list[Cell]] = [
        [
            cells.amount(one.case.prefix_tokens),
            cells.amount(one.case.concurrency),
            cells.path(one.case.path),
            cells.amount(one.group_steps),
            cells.amount(one.once),
            cells.amount(one.by_stock),
            cells.amount(one.factor),
            cells.amount(one.bytes_saved, say=bytes_si),
        ]
        for one in counted
    ]
    columns = (
        "shared prefix",
        "in flight",
        "path",
        "group steps",
        "tokens read",
        "by stock",
        "ratio",
        "modelled saving",
    )
    return Chart(
        id="reads-counted",
        title="Reads per step in the server, counted by the plugin",
        alt=f"Reads of the prefix for each group and step against requests in flight. {_finding([], counted)}",
        figure=_reads_figure(series, sorted(by_concurrency)),
        table=cells.table(
            "reads-counted-data", "Prefix tokens read by us, and by stock as it would have", columns, rows
        ),
        caption="Counts of what was scheduled, in steps that shared a prefix; not a hardware measurement.",
    )


def _one_launch(found: list[Launches]) -> list[Block]:
    """Bars for the widest shape: the same work by every kernel, in bytes and in microseconds."""
    if not found:
        return [Note("missing", "Bytes and microseconds of one launch: this selection has no kernel record.")]
    widest = max(found, key=lambda one: (one.batch, one.prefix_tokens, one.group, one.l2 == "cold"))
    same = [one for one in found if one.shape == widest.shape and one.l2 == widest.l2]
    labels = [f"{one.implementation}, {_layout(one.layout)}" for one in same]
    paths = [one.implementation for one in same]
    caption = f"Shape: {widest.shape}; {widest.device}; {widest.l2} L2."
    measured: list[tuple[str, list[float | None]]] = [
        ("modelled", [one.model_bytes for one in same]),
        ("DRAM, measured", [one.dram_read_bytes for one in same]),
        ("L2, measured", [one.l2_read_bytes for one in same]),
    ]
    shown = [item for item in measured if any(value is not None for value in item[1])]
    said = ", ".join(f"{label} {bytes_si(one.model_bytes)}" for label, one in zip(labels, same, strict=True))
    times = ", ".join(f"{label} {kernels.us_text(one.us)}" for label, one in zip(labels, same, strict=True))
    traffic = Chart(
        id="launch-bytes",
        title="One launch: bytes read",
        alt=f"Bytes of one launch. Modelled: {said}.",
        figure=bars.grouped_bars(labels, shown, _BYTES),
        table=cells.table(
            "launch-bytes-data",
            "Bytes of one launch",
            ("kernel", *(name for name, _ in measured)),
            [
                [cells.path(paths[i], label), *(cells.amount(v[i], kernels.NO_COUNTERS, bytes_si) for _, v in measured)]
                for i, label in enumerate(labels)
            ],
        ),
        caption=caption,
    )
    time = Chart(
        id="launch-us",
        title="One launch: microseconds",
        alt=f"Microseconds of one launch: {times}.",
        figure=bars.bars(labels, [role(path) for path in paths], [one.us for one in same], Axis("µs per launch")),
        table=cells.table(
            "launch-us-data",
            "Microseconds of one launch",
            ("kernel", "µs", "95% interval", "launches"),
            [
                [
                    cells.path(one.implementation, label),
                    cells.amount(one.us.estimate, one.us.note),
                    cells.interval(one.us.low, one.us.high, one.us.note),
                    cells.amount(one.us.n),
                ]
                for label, one in zip(labels, same, strict=True)
            ],
        ),
        caption=caption,
    )
    return [traffic, time]
