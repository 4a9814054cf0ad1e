"""How often the prefix is read: measured traffic over the lines N and 1, and one launch in bytes and microseconds."""

from __future__ import annotations

from collections import defaultdict

from prefixbench.case import ServingCase
from prefixbench.record import ServingMeasurement
from prefixbench.report import bars, cells, figures, kernels
from prefixbench.report.figures import Axis, Point, Series
from prefixbench.report.kernels import Launches
from prefixbench.report.material import Material, path_of
from prefixbench.report.view import Block, Cell, Chart, Note, Section, Table
from prefixbench.report.words import bytes_si, number, path_rank, ratio

_TITLE, _QUESTION = "Reads", "How often does one step read the shared prompt?"
_OURS = ("paged", "cascade", "dense")
_DOUBLINGS = tuple(float(2**power) for power in range(13))


def reads_section(material: Material) -> Section:
    found = kernels.summarize(material.kernels)
    counted = _counted(material)
    measured = _traffic_group(found)
    blocks: list[Block] = []
    if measured or counted:
        blocks.append(_reads_chart(measured, counted))
    if not measured:
        why = "no kernel record of this selection has hardware counters (they need a GPU and its profiler)"
        blocks.append(Note("missing", f"Measured traffic: {why}."))
    blocks += _one_launch(found)
    if found:
        caption = "One launch of each kernel: time and bytes (DRAM and L2 are different things and are not added)"
        blocks.append(kernels.launch_table("launches", caption, found, material.records))
    return Section("reads", _TITLE, _QUESTION, _finding(measured, counted), tuple(blocks))


class _Counted:
    """What the plugin counted for one case: prefix tokens read for shared groups, and what stock would have read."""

    def __init__(self, case: ServingCase) -> None:
        self.case = case
        self.once = self.by_stock = self.bytes_saved = self.tokens = self.group_steps = 0

    @property
    def factor(self) -> float:
        return self.by_stock / self.once


def _counted(material: Material) -> list[_Counted]:
    sums: dict[str, _Counted] = {}
    for record in material.records:
        if not isinstance(record.case, ServingCase) or not isinstance(record.measurement, ServingMeasurement):
            continue
        for block in record.measurement.blocks:
            if block.counters is None or not block.counters.prefix_tokens_read_once:
                continue
            one = sums.setdefault(record.case_hash, _Counted(record.case))
            one.once += block.counters.prefix_tokens_read_once
            one.by_stock += block.counters.prefix_tokens_read_by_stock
            one.bytes_saved += block.counters.bytes_saved
            one.group_steps += block.counters.group_steps
    return sorted(sums.values(), key=lambda c: (c.case.concurrency, c.case.prefix_tokens, path_rank(c.case.path)))


def _traffic_group(found: list[Launches]) -> list[Launches]:
    """The shape, but for its batch, of which hardware counters saw most batch sizes."""
    groups: defaultdict[tuple[object, ...], list[Launches]] = defaultdict(list)
    for one in found:
        if one.dram_read_bytes is not None and one.prefix_bytes:
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


def _finding(measured: list[Launches], counted: list[_Counted]) -> str:
    if measured:
        most = max(one.batch for one in measured)
        said = [
            f"{one.implementation} {ratio(_reads(one, one.dram_read_bytes), 1)} from DRAM and "
            f"{ratio(_reads(one, one.l2_read_bytes), 1)} from L2"
            for one in measured
            if one.batch == most and one.implementation in _OURS
        ]
        return f"With {most} requests, one launch reads the prefix this often, by hardware counters: {'; '.join(said)}."
    if counted:
        best = max(counted, key=lambda c: c.factor)
        return (
            f"The plugin counted {number(best.factor)} reads by stock for each read of ours, "
            f"with {best.case.concurrency} requests in flight. That is counting, not a hardware measurement."
        )
    return "Nothing of this selection says how often the prefix was read."


def _reads(one: Launches, amount: float | None) -> float | None:
    return None if amount is None or not one.prefix_bytes else amount / one.prefix_bytes


def _reads_chart(measured: list[Launches], counted: list[_Counted]) -> Chart:
    batches = sorted({one.batch for one in measured} | {c.case.concurrency for c in counted})
    series = [
        Series("N, once each", "muted", tuple(Point(b, b) for b in batches), "dot", marks=False),
        Series("1, once for all", "ink", tuple(Point(b, 1) for b in batches), "dot", marks=False),
    ]
    for name in dict.fromkeys(one.implementation for one in measured):
        own = [one for one in measured if one.implementation == name]
        series += [
            Series(f"{name}, DRAM", name, tuple(Point(o.batch, _reads(o, o.dram_read_bytes)) for o in own)),
            Series(f"{name}, L2", name, tuple(Point(o.batch, _reads(o, o.l2_read_bytes)) for o in own), "dash"),
        ]
    if counted:
        stock = {c.case.concurrency: c.factor for c in counted}
        series.append(Series("stock, counted", "stock", tuple(Point(n, f) for n, f in sorted(stock.items()))))
        for path in dict.fromkeys(c.case.path for c in counted):
            own_batches = sorted({c.case.concurrency for c in counted if c.case.path == path})
            series.append(Series(f"{path}, counted", path, tuple(Point(n, 1) for n in own_batches)))
    ticks = tuple(float(b) for b in batches)
    shape = f" Kernels: {measured[0].prefix_tokens:,}-token prefix, {measured[0].device}." if measured else ""
    return Chart(
        id="reads",
        title="Reads of the shared prefix in one step",
        alt=f"Reads of the prefix against requests in flight, on logarithmic axes. {_finding(measured, counted)}",
        figure=figures.lines(
            series,
            Axis("requests in flight", log=True, ticks=ticks),
            Axis("reads of the prefix", log=True, ticks=_DOUBLINGS),
        ),
        table=_reads_table(measured, counted),
        caption=f"Dotted: what theory says.{shape} Traffic is divided by the size of one prefix; suffixes, queries and "
        "outputs are in it.",
    )


def _reads_table(measured: list[Launches], counted: list[_Counted]) -> Table:
    rows: list[list[Cell]] = [
        [
            cells.amount(one.batch),
            cells.path(one.implementation),
            cells.text(source),
            cells.amount(_reads(one, amount), kernels.NO_COUNTERS),
            cells.amount(amount, kernels.NO_COUNTERS, bytes_si),
        ]
        for one in measured
        for source, amount in (("DRAM counters", one.dram_read_bytes), ("L2 counters", one.l2_read_bytes))
    ]
    rows += [
        [
            cells.amount(one.case.concurrency),
            cells.path(path_of(one.case.path)),
            cells.text("plugin's count of stock's reads for each of ours"),
            cells.amount(one.factor),
            cells.amount(one.bytes_saved, say=bytes_si),
        ]
        for one in counted
    ]
    columns = ("requests", "path", "source", "reads of the prefix", "bytes (plugin: modelled, saved)")
    return cells.table("reads-data", "Reads of the prefix", columns, rows)


def _one_launch(found: list[Launches]) -> list[Block]:
    """Bars for the widest shape: the same work by every kernel, in bytes and in microseconds."""
    if not found:
        return [Note("missing", "Bytes and microseconds of one launch: this selection has no kernel record.")]
    widest = max(found, key=lambda one: (one.batch, one.prefix_tokens, one.group, one.l2 == "cold"))
    same = [one for one in found if one.shape == widest.shape and one.l2 == widest.l2]
    labels = [f"{one.implementation}, {one.layout}" for one in same]
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
        figure=bars.grouped_bars(labels, shown, Axis("bytes read", log=True, suffix="B", format="~s")),
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
        figure=bars.bars(labels, paths, [one.us for one in same], Axis("µs per launch")),
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
