"""Engine targets: ratios of decode tok/s over launches, with Fieller's interval where there are launches enough."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from prefixbench.analysis import frame
from prefixbench.analysis.comparable import BATCH_TOLERANCE
from prefixbench.analysis.holdups import HELD_UP
from prefixbench.analysis.stats import Interval, Sample, ratio
from prefixbench.case import ServingCase
from prefixbench.record import Record
from prefixbench.targets.table import EngineTarget, Row, no_record

METRIC = "decode_tok_s"
_LISTED = 6


@dataclass(frozen=True)
class _Cell:
    model: str
    workload: str
    tensor_parallel: int
    prefix_tokens: int
    concurrency: int

    @classmethod
    def of(cls, case: ServingCase) -> _Cell:
        return cls(case.model, case.workload, case.tensor_parallel, case.prefix_tokens, case.concurrency)

    def __str__(self) -> str:
        return f"{self.prefix_tokens} x {self.concurrency}"


@dataclass(frozen=True)
class _Measured:
    """`detail` names the arm and the stock backend that were compared."""

    cell: _Cell
    interval: Interval
    detail: str
    record_ids: tuple[str, ...]


@dataclass(frozen=True)
class _Arm:
    """A path or a stock backend: `sample` is tok/s by launch; `held_up` launches have a block that was."""

    name: str
    sample: Sample
    realized_batch: float
    record_ids: tuple[str, ...]
    held_up: int

    def __str__(self) -> str:
        said = f" (held up in {self.held_up} of {len(self.sample)} launches)" if self.held_up else ""
        return f"{self.name} {_mean(self.sample):,.0f} tok/s{said}"


def judge(target: EngineTarget, records: Sequence[Record]) -> Row:
    """The lowest ratio of all cells; one cell without both sides on record leaves the row without a figure."""
    by_cell: dict[_Cell, list[Record]] = {}
    for record in records:
        if isinstance(record.case, ServingCase) and record.status == "ok" and "cpu" not in record.labels:
            by_cell.setdefault(_Cell.of(record.case), []).append(record)
    cells = list(_wanted(target, by_cell))
    if not cells:
        return no_record(target, "none of its cells was measured on a GPU")
    measured = {cell: _measure(target, cell, by_cell.get(cell, [])) for cell in cells}
    good = [result for result in measured.values() if isinstance(result, _Measured)]
    lacking = [f"{cell}{result}" for cell, result in measured.items() if isinstance(result, str)]
    worst = min(good, key=lambda result: result.interval.estimate or 0, default=None)
    if lacking or worst is None:
        some = ", ".join(lacking[:_LISTED]) + (", ..." if len(lacking) > _LISTED else "")
        rest = f"; lowest of the others: {worst.interval.estimate or 0:.3f} at {worst.cell}" if worst else ""
        return no_record(target, f"{len(lacking)} of {len(cells)} cells lack ours or stock: {some}{rest}")
    value = worst.interval.estimate or 0.0
    where = f" at {worst.cell}, the lowest of {len(cells)}" if len(cells) > 1 else ""
    detail = f"{worst.detail}{where}; {_interval_text(worst.interval)}"
    return Row(target.name, target.bound, value, target.is_met(value), detail, worst.record_ids)


def _wanted(target: EngineTarget, recorded: dict[_Cell, list[Record]]) -> Iterator[_Cell]:
    cells = target.cells
    fixed = product(cells.model, cells.workload, cells.tensor_parallel)
    for model, workload, parallel in fixed:
        here = [
            cell
            for cell in recorded
            if (cell.model, cell.workload, cell.tensor_parallel) == (model, workload, parallel)
        ]
        prefixes = cells.prefix_tokens or tuple(sorted({cell.prefix_tokens for cell in here}))
        concurrencies = cells.concurrency or tuple(sorted({cell.concurrency for cell in here}))
        for prefix, concurrency in product(prefixes, concurrencies):
            yield _Cell(model, workload, parallel, prefix, concurrency)


def _measure(target: EngineTarget, cell: _Cell, records: Sequence[Record]) -> _Measured | str:
    """Ours as measured with the newest code; stock on the same device with the same workload, from the same runs
    where they have it. A text where there is nothing to compare: empty, or what speaks against comparing."""
    ours = [record for record in records if _case(record).plugin and _case(record).path in target.ours]
    if not ours:
        return ""
    newest = max(ours, key=lambda record: record.launch.started_at)
    ours = [r for r in ours if _source(r) == _source(newest) and _conditions(r) == _conditions(newest)]
    stock = [r for r in records if not _case(r).plugin and _conditions(r) == _conditions(newest)]
    sweeps = {(r.notes or {}).get("sweep") for r in ours}
    stock = [r for r in stock if (r.notes or {}).get("sweep") in sweeps] or stock
    best = _best({path: [r for r in ours if _case(r).path == path] for path in target.ours})
    backends = dict.fromkeys(_case(r).stock_backend for r in stock)
    base = _best({backend: [r for r in stock if _case(r).stock_backend == backend] for backend in backends})
    if best is None or base is None:
        return ""
    batches = (base.realized_batch, best.realized_batch)
    if abs(batches[1] - batches[0]) > BATCH_TOLERANCE * batches[0]:
        return f" (in flight {batches[1]:.0f}, with stock {batches[0]:.0f})"
    rates = f"{best}, stock {base}"
    return _Measured(cell, ratio(best.sample, base.sample), rates, (*best.record_ids, *base.record_ids))


def _best(arms: dict[str, list[Record]]) -> _Arm | None:
    """The arm with the highest mean rate."""
    found = []
    for name, records in arms.items():
        rows = frame.launches(frame.blocks(records))
        sample = frame.sample(rows, METRIC) if not rows.empty else {}
        if sample:
            held_up = sum(any(flag.startswith(HELD_UP) for flag in flags) for flags in rows["flags"])
            realized = float(rows["realized_batch"].mean())
            found.append(_Arm(name, sample, realized, tuple(rows["record_id"]), held_up))
    return max(found, key=lambda arm: _mean(arm.sample), default=None)


def _conditions(record: Record) -> tuple[object, ...]:
    case = _case(record)
    settings = json.dumps([case.workload_settings, case.model_settings], sort_keys=True)
    return (frame.device_name(record.environment), case.suffix_tokens, case.output_tokens, settings)


def _source(record: Record) -> object:
    return (record.notes or {}).get("plugin_source")


def _case(record: Record) -> ServingCase:
    assert isinstance(record.case, ServingCase)
    return record.case


def _mean(sample: Sample) -> float:
    return sum(sample.values()) / len(sample)


def _interval_text(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"n = {interval.n}, no interval"
    return f"{interval.confidence:.0%} interval {interval.low:.3f} to {interval.high:.3f}, n = {interval.n}"
