"""Kernel launches as the reads and dispatcher sections need them: one row per shape, with means over launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pandas as pd

from prefixbench.analysis.stats import Interval, mean_interval
from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.view import Cell, Table
from prefixbench.report.words import bytes_si, number, path_rank, percent, ratio

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
_SHAPE = ("device", "prefix_tokens", "suffix_tokens", "batch", "q_heads", "kv_heads", "head_dim", "page_size", "dtype")
_VARIANT = ("implementation", "layout", "l2", "settings")


@dataclass(frozen=True)
class Launches:
    """One implementation on one shape: microseconds with an interval over launches, and the bytes of one launch."""

    implementation: str
    layout: str
    l2: str
    device: str
    prefix_tokens: int
    suffix_tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    us: Interval
    us_by_launch: dict[str, float]
    model_bytes: float
    dram_read_bytes: float | None
    l2_read_bytes: float | None
    bytes_per_s: float
    copy_bytes_per_s: float | None
    served_from_l2: bool
    flags: tuple[str, ...]
    record_ids: tuple[str, ...]

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def m_eff(self) -> int:
        return self.batch * self.group

    @property
    def prefix_bytes(self) -> int | None:
        """K and V of one copy of the prefix; None for a dtype whose size is not known here."""
        item = _ITEM_BYTES.get(self.dtype)
        return None if item is None else 2 * self.prefix_tokens * self.kv_heads * self.head_dim * item

    @property
    def shape(self) -> str:
        suffix = f" + {self.suffix_tokens:,}" if self.suffix_tokens else ""
        heads = f"{self.q_heads}/{self.kv_heads} heads"
        return f"{self.prefix_tokens:,} × {self.batch}{suffix}, {heads}, {self.dtype}, pages of {self.page_size}"


def summarize(rows: pd.DataFrame) -> list[Launches]:
    """Rows of `frame.kernels` by shape and implementation, ours first, then by shape."""
    if rows.empty:
        return []
    found = [_one(group) for _, group in rows.groupby([*_SHAPE, *_VARIANT], dropna=False, sort=True)]
    return sorted(
        found, key=lambda f: (f.prefix_tokens, f.suffix_tokens, f.batch, f.group, path_rank(f.implementation))
    )


def _one(group: pd.DataFrame) -> Launches:
    first = group.iloc[0]
    us = {str(launch): float(value) for launch, value in zip(group["launch_id"], group["kernel_us"], strict=True)}
    return Launches(
        implementation=str(first["implementation"]),
        layout=str(first["layout"]),
        l2=str(first["l2"]),
        device=str(first["device"]),
        prefix_tokens=int(first["prefix_tokens"]),
        suffix_tokens=int(first["suffix_tokens"]),
        batch=int(first["batch"]),
        q_heads=int(first["q_heads"]),
        kv_heads=int(first["kv_heads"]),
        head_dim=int(first["head_dim"]),
        page_size=int(first["page_size"]),
        dtype=str(first["dtype"]),
        us=mean_interval(list(us.values())),
        us_by_launch=us,
        model_bytes=float(first["model_bytes"]),
        dram_read_bytes=_known(group["dram_read_bytes"]),
        l2_read_bytes=_known(group["l2_read_bytes"]),
        bytes_per_s=float(group["bytes_per_s"].mean()),
        copy_bytes_per_s=_known(group["copy_bytes_per_s"]),
        served_from_l2=bool(group["served_from_l2"].any()),
        flags=tuple(sorted({flag.partition(":")[0] for flags in group["flags"] for flag in flags})),
        record_ids=tuple(group["record_id"]),
    )


def _known(values: pd.Series[float]) -> float | None:
    known = values.dropna()
    return float(known.mean()) if len(known) else None


def launch_table(name: str, caption: str, found: list[Launches], records: tuple[Record, ...]) -> Table:
    """Bytes and microseconds of one launch, for every shape."""
    failed = {r.record_id for r in records if r.status != "ok"}
    agreement = second_clock(found, records)
    columns = ("shape", "kernel", "layout", "L2", "µs", "95% interval", "modelled bytes", "DRAM read", "L2 read")
    rows = [
        [
            cells.text(one.shape),
            cells.path(one.implementation),
            cells.text(one.layout),
            cells.text(one.l2),
            cells.amount(one.us.estimate, one.us.note),
            cells.interval(one.us.low, one.us.high, one.us.note),
            cells.amount(one.model_bytes, say=bytes_si),
            cells.amount(one.dram_read_bytes, NO_COUNTERS, bytes_si),
            cells.amount(one.l2_read_bytes, NO_COUNTERS, bytes_si),
            _bandwidth(one),
            cells.amount(theirs, _NO_SECOND_CLOCK, ratio),
            cells.text(_beware(one, failed)),
        ]
        for one, theirs in zip(found, agreement, strict=True)
    ]
    return cells.table(name, caption, (*columns, "of copy bandwidth", "FlashInfer's clock", "beware"), rows)


def second_clock(found: Sequence[Launches], records: Sequence[Record]) -> list[float | None]:
    """Microseconds by FlashInfer's own timing over ours, for each of `found` of which it timed the same launches."""
    theirs_us = {record.record_id: (record.notes or {}).get("flashinfer_clock_us") for record in records}
    ratios = []
    for one in found:
        pairs = [(theirs_us.get(i), one.us_by_launch[i.rpartition("/")[2]]) for i in one.record_ids]
        known = [theirs / us for theirs, us in pairs if isinstance(theirs, float) and one.l2 == "warm"]
        ratios.append(fmean(known) if known else None)
    return ratios


def _beware(one: Launches, failed: set[str]) -> str:
    """Clocks are watched by cell, while all implementations of a shape take turns."""
    said = ["a launch of it failed"] if failed & set(one.record_ids) else []
    return "; ".join([*said, *(f"{flag} in its cell" for flag in one.flags)])


_NO_SECOND_CLOCK = "one kernel of a shape is timed by FlashInfer's own clock too, where it is installed, on a warm L2"
NO_COUNTERS = "no hardware counters were read for it"


def _bandwidth(one: Launches) -> Cell:
    if one.copy_bytes_per_s is None:
        return cells.missing("no copy bandwidth was measured beside it")
    share = one.bytes_per_s / one.copy_bytes_per_s
    return Cell("served from L2" if one.served_from_l2 else percent(share, 0), share)


def us_text(interval: Interval) -> str:
    return f"{number(interval.estimate)} µs"
