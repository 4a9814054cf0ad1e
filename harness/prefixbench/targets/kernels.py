"""Kernel targets: ratios inside one process, the newest one that holds every implementation a row needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from prefixbench.case import KernelCase
from prefixbench.record import KernelMeasurement, Record
from prefixbench.targets.table import KernelShape, KernelTarget, Row, no_record

L2 = "warm"


def judge(target: KernelTarget, records: Sequence[Record]) -> Row:
    """The newest launch with a good record of one of ours and of all that the row is held against.

    A peer without a good record in that launch makes the row unproven: without the strongest peer a ratio means little.
    """
    launches: dict[str, dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: record.launch.started_at):
        if isinstance(record.case, KernelCase) and _is_shape(record.case, target.shape) and "cpu" not in record.labels:
            launches.setdefault(record.launch.launch_id, {})[record.case.implementation] = record
    detail = "this shape was never measured on a GPU"
    for found in reversed(list(launches.values())):
        lacking = _lacking(target, found)
        if lacking is None:
            return _row(target, found)
        detail = lacking
    return no_record(target, detail)


def _is_shape(case: KernelCase, shape: KernelShape) -> bool:
    return all(getattr(case, name) == getattr(shape, name) for name in KernelShape.__dataclass_fields__)


def _lacking(target: KernelTarget, found: Mapping[str, Record]) -> str | None:
    if not any(_warm_us(found.get(name)) for name in target.ours):
        return _complaint(target.ours[0], found.get(target.ours[0]))
    return next((_complaint(name, found.get(name)) for name in target.against if not _warm_us(found.get(name))), None)


def _complaint(name: str, record: Record | None) -> str:
    if record is None:
        return f"{name} was not measured beside the others"
    reason = f": {record.failure.message}" if record.failure else ""
    return f"{name} is recorded as {record.status}{reason}"


def _row(target: KernelTarget, found: Mapping[str, Record]) -> Row:
    ours = _fastest(target.ours, found)
    ours_us, record = _warm_us(found[ours]) or 0.0, found[ours]
    used = [record]
    assert isinstance(record.measurement, KernelMeasurement)
    if target.against:
        peer = _fastest(target.against, found)
        peer_us = _warm_us(found[peer]) or 0.0
        used.append(found[peer])
        measured = ours_us / peer_us
        detail = f"{ours} {ours_us:.1f} us, {peer} {peer_us:.1f} us"
    else:
        copy = record.measurement.copy_bandwidth_bytes_per_s
        if not copy:
            return no_record(target, f"{ours} was recorded without the copy bandwidth of its process")
        rate = record.measurement.model_bytes / (ours_us / 1e6)
        measured = rate / copy
        detail = f"{ours} {ours_us:.1f} us, {rate / 1e12:.2f} of {copy / 1e12:.2f} TB/s"
    if target.aim_us is not None:
        detail += f", aim {target.aim_us:g} us"
    flags = {str(flag) for used_record in used if (flag := (used_record.notes or {}).get("flags"))}
    detail += "".join(f"; {flag}" for flag in sorted(flags))
    ids = tuple(used_record.record_id for used_record in used)
    return Row(target.name, target.bound, measured, target.is_met(measured), detail, ids)


def _fastest(names: Sequence[str], found: Mapping[str, Record]) -> str:
    return min((name for name in names if _warm_us(found.get(name))), key=lambda name: _warm_us(found[name]) or 0.0)


def _warm_us(record: Record | None) -> float | None:
    """Median of a record that is ok, which includes a right result; else None."""
    if record is None or record.status != "ok" or not isinstance(record.measurement, KernelMeasurement):
        return None
    return next((median(t.samples_us) for t in record.measurement.timings if t.l2 == L2 and t.samples_us), None)
