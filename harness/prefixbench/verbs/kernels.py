"""`prefixbench kernels`: a Hydra application that times decode-attention kernels beside their peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from prefixbench.case import KernelCase
from prefixbench.config import hydra_app
from prefixbench.config import kernels as kernels_config
from prefixbench.config.kernels import KernelsConfig
from prefixbench.jobs import kernels as kernels_runner
from prefixbench.measures.kernel.inputs import Shape
from prefixbench.record import Correctness, KernelMeasurement, Record
from prefixbench.verbs.measured import measure


def main(argv: Sequence[str]) -> int:
    """Measures every point; 0 when all are recorded as ok, 1 when some failed or gave a wrong result."""
    kernels_config.register_schema()
    return measure("kernels", argv, task, lambda composed: _checked(composed).runs, summarize)


def task(composed: DictConfig) -> None:
    """One Hydra job."""
    config = kernels_config.load(composed)
    job = kernels_runner.Job(
        config=config,
        resolved=hydra_app.plain(composed),
        config_yaml=OmegaConf.to_yaml(composed, resolve=True),
        overrides=hydra_app.typed(),
        folder=Path(HydraConfig.get().runtime.output_dir),
    )
    console = Console(highlight=False)
    kernels_runner.run(job, lambda line: console.print(line, markup=False, soft_wrap=True))


def summarize(records: Sequence[Record], console: Console) -> int:
    """One table per shape, then every point that is not ok; returns the exit code."""
    shapes: dict[Shape, list[Record]] = {}
    for record in records:
        shapes.setdefault(_shape(record), []).append(record)
    for shape, found in shapes.items():
        for line in (kernels_runner.describe(shape), *_table(found), ""):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    failed = [record for record in records if record.status != "ok"]
    console.print(f"{len(records)} points recorded, {len(failed)} not ok", highlight=False)
    for record in failed:
        where = f"{_name(record)}, {kernels_runner.describe(_shape(record))}"
        reason = record.failure.message if record.failure else ""
        line = f"  {where}: {record.status}: {reason} ({record.record_id})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


_COLUMNS = "  {:<24} {:>10} {:>10} {:>8} {:>8} {:>7} {:>9} {:>17}  {}"


def _table(records: Sequence[Record]) -> list[str]:
    """Lines of fixed width, fastest first: a pipe or a log has no terminal to fit a table to."""
    heading = ("", "warm us", "cold us", "TFLOP/s", "GB/s", "of copy", "DRAM MB", "error / bound", "")
    lines = [_COLUMNS.format(*heading)]
    for record in sorted(records, key=lambda record: median_us(record) or float("inf")):
        measured = record.measurement
        cells = _cells(record, measured) if isinstance(measured, KernelMeasurement) else ["-"] * 7
        flags = str((record.notes or {}).get("flags") or "")
        lines.append(_COLUMNS.format(_name(record), *cells, flags if record.status == "ok" else record.status))
    return lines


def _cells(record: Record, measured: KernelMeasurement) -> list[str]:
    first_us = median_us(record)
    rate = measured.model_bytes / (first_us / 1e6) if first_us else None
    copy = measured.copy_bandwidth_bytes_per_s
    counted = next((t.dram_read_bytes for t in measured.traffic if t.source == "ncu"), None)
    correct = measured.correctness
    return [
        _number(median_us(record, "warm")),
        _number(median_us(record, "cold")),
        _number(measured.flops / first_us / 1e6 if first_us else None),
        _number(rate / 1e9 if rate else None),
        f"{rate / copy:.0%}" if rate and copy else "-",
        _number(counted / 1e6 if counted is not None else None),
        _error(correct) if correct else "-",
    ]


def _error(correct: Correctness) -> str:
    error = "not finite" if correct.max_abs_error is None else f"{correct.max_abs_error:.1e}"
    return f"{error} / {correct.bound:.1e}"


def _shape(record: Record) -> Shape:
    assert isinstance(record.case, KernelCase)
    return Shape.of(record.case)


def _name(record: Record) -> str:
    assert isinstance(record.case, KernelCase)
    return record.case.implementation


def median_us(record: Record, l2: str | None = None) -> float | None:
    """Median microseconds of the record's first timing, or of the one with this L2 state."""
    if not isinstance(record.measurement, KernelMeasurement):
        return None
    timings = record.measurement.timings
    return next((median(t.samples_us) for t in timings if l2 in (None, t.l2) and t.samples_us), None)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _checked(composed: DictConfig) -> KernelsConfig:
    """Checks everything, shapes and device included, before anything is measured."""
    config = kernels_config.load(composed)
    kernels_runner.plan_cells(kernels_config.requests(config), kernels_runner.resolve_device(config.device))
    return config
