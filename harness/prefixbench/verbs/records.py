"""`prefixbench show`, `compare` and `export`: records in the terminal and as tables for pandas."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixbench.analysis import frame
from prefixbench.analysis.claims.evidence import figure
from prefixbench.analysis.comparable import case_label
from prefixbench.analysis.compare import Comparison
from prefixbench.analysis.compare import compare as compare_records
from prefixbench.analysis.outside import outside_tok_s, tok_s
from prefixbench.analysis.requests import latency_percentiles, requests
from prefixbench.analysis.stats import Interval
from prefixbench.errors import NotComparableError, StoreError, UsageError
from prefixbench.hints import unknown
from prefixbench.record import (
    DispatchMeasurement,
    KernelMeasurement,
    NumericsMeasurement,
    OutsideMeasurement,
    Record,
    ServingMeasurement,
)
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, add_selector, select

_LEVELS: dict[str, Callable[[Sequence[Record]], pd.DataFrame]] = {
    "launch": lambda records: frame.launches(frame.blocks(records)),
    "block": frame.blocks,
    "request": requests,
    "kernel": frame.kernels,
}


def show(argv: Sequence[str]) -> int:
    """One line per record; everything about it when there is only one."""
    parser = Parser(prog="prefixbench show", description="Print records.")
    add_selector(parser)
    add_runs(parser)
    options = parser.parse_args(argv)
    records = select(options.selector, options.runs)
    console = _console()
    console.print(_summary(records))
    if len(records) == 1:
        for line in _details(records[0]):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def compare(argv: Sequence[str]) -> int:
    """Ratios of two selections; 3 when they differ in what is not compared."""
    parser = Parser(
        prog="prefixbench compare",
        description="Compare two selections of records, point by point; ratios are second over first.",
        epilog="exit codes: 0 compared; 3 environment or realized batch differ (named, with both values)",
    )
    parser.add_argument("first", help="selector, quoted when it has several words: 'tag=a path=stock'")
    parser.add_argument("second", help="selector")
    add_runs(parser)
    parser.add_argument(
        "--metrics", nargs="+", default=["decode_tok_s"], metavar="METRIC", help="default: decode_tok_s"
    )
    options = parser.parse_args(argv)
    for metric in options.metrics:
        if metric not in frame.HIGHER_IS_BETTER:
            raise unknown("metric", metric, frame.HIGHER_IS_BETTER)
    first, second = (select([words], options.runs) for words in (options.first, options.second))
    found = compare_records(first, second, options.metrics)
    console = _console()
    if not found.pairs:
        raise NotComparableError(
            f"{options.first!r} and {options.second!r} have no point in common; "
            f"only on one side: {'; '.join(found.unmatched[:3]) or 'none'}"
        )
    console.print(_comparison(found))
    for mismatch in found.mismatches:
        line = f"differs: {mismatch.key}: {mismatch.baseline} in the first, {mismatch.candidate} in the second"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for point in found.unmatched:
        console.print(f"only on one side: {point}", markup=False, highlight=False, soft_wrap=True)
    return NotComparableError.exit_code if found.mismatches or any(pair.refusal for pair in found.pairs) else 0


def export(argv: Sequence[str]) -> int:
    """Writes one table; the file's ending says which format."""
    parser = Parser(prog="prefixbench export", description="Write records as a table.")
    add_selector(parser)
    add_runs(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, help="FILE.parquet or FILE.csv")
    parser.add_argument("--level", choices=[*_LEVELS], default="launch", help="what a row is; default: launch")
    options = parser.parse_args(argv)
    if options.output.suffix not in (".parquet", ".csv"):
        raise UsageError(f"{options.output}: the ending decides the format; allowed: .parquet, .csv")
    rows = _LEVELS[options.level](select(options.selector, options.runs))
    if rows.empty:
        raise UsageError(f"these records have no row at level {options.level!r}; other levels: {', '.join(_LEVELS)}")
    flat = rows.map(lambda value: "; ".join(map(str, value)) if isinstance(value, tuple) else value)
    try:
        if options.output.suffix == ".csv":
            flat.to_csv(options.output, index=False)
        else:
            flat.to_parquet(options.output, index=False)
    except OSError as error:
        raise StoreError(f"{options.output} could not be written: {error.strerror or error}") from None
    sys.stdout.write(f"{options.output}: {len(flat)} rows, {len(flat.columns)} columns\n")
    return 0


def _summary(records: Sequence[Record]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("record", "status", "case", "on", "figure", "steps by kernel", "flags"):
        table.add_column(heading)
    for record in records:
        on = frame.device_name(record.environment)
        cells = (record.record_id, record.status, case_label(record), on, *_figures(record))
        table.add_row(*map(escape, cells))
    return table


def _figures(record: Record) -> tuple[str, str, str]:
    """What was measured, which kernels served it, and flags; in a few words."""
    match record.measurement:
        case ServingMeasurement():
            rows = frame.launches(frame.blocks([record]))
            return ("—", "—", "") if rows.empty else _serving_figures(rows.iloc[0])
        case KernelMeasurement() as measured:
            timings = (f"{row.kernel_us:.4g} us ({row.l2})" for row in frame.kernels([record]).itertuples())
            return ", ".join(timings) or "—", measured.path_ran or "—", ""
        case NumericsMeasurement() as measured:
            positions = sum(map(len, measured.logprobs))
            return f"log-probabilities of {positions:,} positions", _steps(measured.counters.steps), ""
        case OutsideMeasurement(pairs):
            ours, theirs = (tok_s(pair.ours) for pair in pairs), (outside_tok_s(pair.theirs) for pair in pairs)
            counted = Counter[str]()
            for pair in pairs:
                counted.update(pair.counters.steps if pair.counters else {})
            return f"{_mean_rate(ours)} tok/s by our client, {_mean_rate(theirs)} by theirs", _steps(counted), ""
        case DispatchMeasurement() as measured:
            decision, planning = (_median_us(values) for values in (measured.decision_us, measured.planning_us))
            return f"decision {decision}, planning {planning}", measured.path_chosen, ""
        case None:
            return "—", "—", ""


def _mean_rate(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):,.0f}" if known else "—"


def _median_us(values: Sequence[float]) -> str:
    return f"{median(values):.4g} us" if values else "—"


def _serving_figures(row: pd.Series) -> tuple[str, str, str]:
    figures = _rate(row["decode_tok_s"], "{:,.0f} tok/s") + ", " + _rate(row["tpot_ms"], "{:.3g} ms/token")
    return figures, _steps({kernel: row[f"share_{kernel}"] for kernel in frame.KERNELS}), "; ".join(row["flags"])


def _steps(counted: Mapping[str, float]) -> str:
    total = sum(counted.values())
    shares = (f"{count / total:.0%} {kernel}" for kernel, count in counted.items() if count > 0)
    return ", ".join(shares) or "not counted"


def _details(record: Record) -> list[str]:
    environment, launch = record.environment, record.launch
    versions = ", ".join(f"{name} {version}" for name, version in environment.packages.items() if version)
    dirty = " (dirty)" if environment.git_dirty else ""
    lines = [
        f"labels: {', '.join(record.labels) or 'none'}",
        f"launch: {launch.launch_id}, started {launch.started_at}, start-up {_rate(launch.startup_s, '{:.1f} s')}",
        f"machine: {environment.hostname}, {environment.os}, {environment.cpu_count} CPUs ({environment.cpu})",
        f"versions: Python {environment.python}, {versions}; commit {environment.git_commit}{dirty}",
        f"overrides: {' '.join(record.overrides) or 'none'}",
    ]
    if record.failure:
        lines.append(f"failure: {record.failure.kind}: {record.failure.message}")
    if isinstance(record.measurement, ServingMeasurement):
        lines += _serving_details(record, record.measurement)
    elif isinstance(record.measurement, KernelMeasurement):
        for traffic in record.measurement.traffic:
            read = f"DRAM read {traffic.dram_read_bytes}, L2 read {traffic.l2_read_bytes} bytes"
            lines.append(f"traffic ({traffic.source}): {read}")
    return lines


def _serving_details(record: Record, measurement: ServingMeasurement) -> list[str]:
    lines = []
    for _, row in frame.blocks([record]).iterrows():
        figures = (
            f"{_rate(row['decode_tok_s'], '{:,.1f}')} decode, {_rate(row['decode_tok_s_whole'], '{:,.1f}')} whole, "
            f"{_rate(row['end_to_end_tok_s'], '{:,.1f}')} end-to-end tok/s; TTFT {_rate(row['ttft_ms'], '{:.1f} ms')}"
        )
        counts = f"{row['completed']} done, {row['failed']} failed, batch {_rate(row['realized_batch'], '{:.0f}')}"
        missing = f"; {row['missing']}" if row["missing"] else ""
        lines.append(f"block {row['position']}: {figures}; {counts}; {row['cache_state']}{missing}")
    for name, quantiles in latency_percentiles(record).items():
        texts = [
            f"p{100 * q:g} {quantity.value:.4g}" for q, quantity in quantiles.items() if quantity.value is not None
        ]
        absent = next((q.reason for q in quantiles.values() if q.reason), None)
        lines.append(f"{name}: {', '.join(texts) or 'no percentile'}" + (f" ({absent})" if absent else ""))
    if measurement.placement is not None:
        placed = measurement.placement
        lines.append(f"placement: {placed.contiguous} contiguous, {placed.paged} paged of {placed.pool_slots} slots")
    return lines


def _comparison(found: Comparison) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("point", "metric", "first", "second", "second / first"):
        table.add_column(heading)
    for pair in found.pairs:
        shown = f"refused: {pair.refusal}" if pair.ratio is None else figure(pair.ratio, "{:.3f}")
        sides = [
            f"{arm}: {_mean(interval)}" for arm, interval in zip(pair.arms, (pair.first, pair.second), strict=True)
        ]
        table.add_row(*map(escape, (pair.point, pair.metric, *sides, shown)))
    return table


def _mean(interval: Interval) -> str:
    return figure(interval, "{:,.4g}")


def _rate(value: float | None, text: str) -> str:
    return "—" if value is None or math.isnan(value) else text.format(value)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 180)
