"""Stated targets against records: a row is met, missed, or has no record, and the last two are the same failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from prefixbench.errors import UsageError

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class KernelShape:
    """The fields of a KernelCase that name a shape."""

    prefix_tokens: int
    suffix_tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    layout: str

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class KernelTarget:
    """The fastest of `ours` against the fastest of `against`, or against the copy bandwidth."""

    name: str
    shape: KernelShape
    ours: tuple[str, ...]
    against: tuple[str, ...] = ()
    ratio_at_most: float | None = None
    bandwidth_share_at_least: float | None = None
    aim_us: float | None = None

    __pydantic_config__ = _STRICT

    def __post_init__(self) -> None:
        if (self.ratio_at_most is None) == (self.bandwidth_share_at_least is None):
            raise ValueError("give ratio_at_most or bandwidth_share_at_least, one of them")
        if (self.ratio_at_most is None) == bool(self.against):
            raise ValueError("ratio_at_most needs `against`, bandwidth_share_at_least has none")

    @property
    def bound(self) -> str:
        if self.ratio_at_most is not None:
            return f"<= {self.ratio_at_most:g}x"
        return f">= {self.bandwidth_share_at_least:.0%}"

    def is_met(self, measured: float) -> bool:
        if self.ratio_at_most is not None:
            return measured <= self.ratio_at_most
        return self.bandwidth_share_at_least is not None and measured >= self.bandwidth_share_at_least


@dataclass(frozen=True)
class Cells:
    """Serving cells: every combination of the listed values. None: every value that is on record, at least one."""

    model: tuple[str, ...]
    workload: tuple[str, ...]
    tensor_parallel: tuple[int, ...]
    prefix_tokens: tuple[int, ...] | None
    concurrency: tuple[int, ...] | None

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class EngineTarget:
    """Decode tok/s of the best of `ours` over the best stock server; the lowest ratio of all cells counts."""

    name: str
    cells: Cells
    ours: tuple[str, ...]
    ratio_at_least: float

    __pydantic_config__ = _STRICT

    @property
    def bound(self) -> str:
        return f">= {self.ratio_at_least:g}x"

    def is_met(self, measured: float) -> bool:
        return measured >= self.ratio_at_least


@dataclass(frozen=True)
class Targets:
    kernels: tuple[KernelTarget, ...]
    engine: tuple[EngineTarget, ...]

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Row:
    """One target beside what was measured. `measured` None: no record; `detail` says which figures, or what lacks."""

    name: str
    bound: str
    measured: float | None
    is_met: bool
    detail: str
    record_ids: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return "met" if self.is_met else "no record" if self.measured is None else "missed"


def no_record(target: KernelTarget | EngineTarget, detail: str) -> Row:
    return Row(target.name, target.bound, None, is_met=False, detail=detail)


def read_targets(path: Path) -> Targets:
    """UsageError, naming the file and the first wrong key, when it is not a targets file."""
    try:
        return TypeAdapter(Targets).validate_python(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None


def is_all_met(rows: Sequence[Row]) -> bool:
    """An empty table proves nothing."""
    return bool(rows) and all(row.is_met for row in rows)
