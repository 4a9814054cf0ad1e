"""Kernel records -> cells as a dispatcher meets them: one shape, one shared prefix, microseconds by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from prefixbench.analysis import frame
from prefixbench.errors import UsageError
from prefixbench.record import Record
from prefixonce.cost import Layer
from prefixonce.step import DecodeStep, Path, PrefixGroup, Segment

STOCK_PEERS = ("flashinfer-decode", "paged")
"""What may stand for the decode kernel of a stock server, the closest first."""

_PATHS = {"cascade": Path.CASCADE, "dense": Path.DENSE}
_SHAPE = ["prefix_tokens", "suffix_tokens", "batch", "q_heads", "kv_heads", "head_dim", "dtype", "page_size"]


@dataclass(frozen=True)
class TimedCell:
    """`us`: means over launches of the median of a launch, cold L2 where that was timed; paths that were timed."""

    layer: Layer
    us: Mapping[Path, float]
    record_ids: tuple[str, ...]

    @property
    def m_eff(self) -> int:
        return self.layer.rows * self.layer.q_heads // self.layer.kv_heads

    @property
    def label(self) -> str:
        layer = self.layer
        shape = f"prefix {layer.prefix_tokens} + {layer.own_tokens:.0f}, {layer.rows} requests"
        return f"{shape}, {layer.q_heads}/{layer.kv_heads} heads"

    @property
    def is_complete(self) -> bool:
        """Whether stock and both ways of sharing were timed."""
        return {Path.STOCK, *_PATHS.values()} <= set(self.us)

    def step(self) -> DecodeStep:
        """The decode step that was timed: one group, its prefix in one run."""
        layer = self.layer
        group = PrefixGroup(tuple(range(layer.rows)), layer.prefix_tokens, (Segment(0, layer.prefix_tokens),))
        lengths = (layer.prefix_tokens + int(layer.own_tokens),) * layer.rows
        return DecodeStep(lengths, layer.q_heads, layer.kv_heads, layer.head_dim, (group,))


@dataclass(frozen=True)
class TimedGrid:
    """Cells of one device. `stock` is the implementation that stands for stock, `l2` the state that was timed."""

    device: str
    stock: str | None
    l2: str
    cells: tuple[TimedCell, ...]

    @property
    def complete(self) -> tuple[TimedCell, ...]:
        return tuple(cell for cell in self.cells if cell.is_complete)


def timed_grid(records: Sequence[Record]) -> TimedGrid:
    """The kernel records of one device; UsageError where they are of none or of several."""
    rows = frame.kernels(records)
    devices = [] if rows.empty else sorted(set(rows["device"]))
    if len(devices) != 1:
        found = ", ".join(devices) or "no kernel records"
        raise UsageError(f"the records of exactly one device are needed, found {found}; narrow the selector")
    l2 = "cold" if "cold" in set(rows["l2"]) else "warm"
    return TimedGrid(devices[0], stock_peer(rows), l2, timed_cells(rows))


def stock_peer(rows: pd.DataFrame) -> str | None:
    """The implementation that stands for stock in these rows of `frame.kernels`."""
    timed = set() if rows.empty else set(rows["implementation"])
    return next((name for name in STOCK_PEERS if name in timed), None)


def timed_cells(rows: pd.DataFrame) -> tuple[TimedCell, ...]:
    """Cells with a shared prefix from rows of `frame.kernels` of one device; failed and wrong results take no part."""
    if rows.empty:
        return ()
    peer = stock_peer(rows)
    names = _PATHS if peer is None else {**_PATHS, peer: Path.STOCK}
    shared = (rows["layout"] != "unique") & (rows["prefix_tokens"] > 0) & (rows["status"] == "ok")
    chosen = rows[shared & rows["implementation"].isin(names)]
    return tuple(_cell(group, names) for _, group in chosen.groupby(_SHAPE, sort=True))


def _cell(group: pd.DataFrame, names: Mapping[str, Path]) -> TimedCell:
    timed = group[group["l2"] == "cold"] if "cold" in set(group["l2"]) else group
    us = timed.groupby("implementation")["kernel_us"].mean()
    prefix, own, rows, q_heads, kv_heads, head_dim = (int(timed[name].iloc[0]) for name in _SHAPE[:6])
    return TimedCell(
        Layer(rows, prefix, prefix, q_heads, kv_heads, head_dim, own),
        {names[str(name)]: float(value) for name, value in us.items()},
        tuple(dict.fromkeys(timed["record_id"])),
    )
