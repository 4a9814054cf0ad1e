"""The cost model behind `auto`: microseconds of one layer from bytes, FLOPs and launch overheads; pure, no torch.

A profile holds a handful of physical parameters fitted on one GPU by `prefixbench calibrate`. An unknown device gets
the conservative profile, which shares only where the gain is large on any hardware.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path as FilePath

from prefixonce.errors import UnsupportedError
from prefixonce.step import DecodeStep, Path, PrefixGroup


@dataclass(frozen=True, slots=True)
class PathCost:
    """One shared path: matrix rate, rate of reading K/V, smallest query tile, fixed cost per step and per group."""

    flops_per_us: float
    bytes_per_us: float
    tile_rows: int
    step_us: float
    group_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Fitted for one device. `stock_bytes_per_us` is the rate at which stock decode re-reads a *shared* prefix
    (mostly from L2, so above the memory bandwidth)."""

    device: str
    source: str
    stock_bytes_per_us: float
    element_bytes: int
    cascade: PathCost
    dense: PathCost

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        """Cost of the group's prefix on one layer, without what a step pays once (`step_us`)."""
        kv_bytes = 2 * group.prefix_tokens * step.num_kv_heads * step.head_dim * self.element_bytes
        if path in (Path.STOCK, Path.PAGED):
            return len(group.rows) * kv_bytes / self.stock_bytes_per_us
        cost = self._path(path)
        tiles = math.ceil(step.m_eff(group) / cost.tile_rows)
        flops = 4 * tiles * cost.tile_rows * group.prefix_tokens * step.num_kv_heads * step.head_dim
        return max(flops / cost.flops_per_us, kv_bytes / cost.bytes_per_us) + cost.group_us

    def step_us(self, path: Path) -> float:
        """What a step pays once for sharing anything by this path: extra launches and the merge."""
        return 0.0 if path in (Path.STOCK, Path.PAGED) else self._path(path).step_us

    def _path(self, path: Path) -> PathCost:
        return self.dense if path is Path.DENSE else self.cascade

    def dump(self, file: FilePath) -> None:
        file.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


# Low rates and high overheads: a GPU for which nobody calibrated shares long prefixes among many requests only.
CONSERVATIVE = Profile(
    device="unknown",
    source="conservative defaults; run `prefixbench calibrate` on this GPU",
    stock_bytes_per_us=12e6,
    element_bytes=2,
    cascade=PathCost(flops_per_us=60e6, bytes_per_us=1e6, tile_rows=64, step_us=25.0, group_us=3.0),
    dense=PathCost(flops_per_us=100e6, bytes_per_us=1e6, tile_rows=64, step_us=25.0, group_us=3.0),
)


def load_profile(file: FilePath) -> Profile:
    """Reads what `Profile.dump` wrote; one line names the file and the field that is wrong."""
    try:
        data = json.loads(file.read_text())
        cascade, dense = (PathCost(**data.pop(name)) for name in ("cascade", "dense"))
        profile = Profile(cascade=cascade, dense=dense, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        allowed = ", ".join(field.name for field in fields(Profile))
        raise UnsupportedError(f"profile {file}: {error}; a profile has the fields {allowed}") from error
    for part in (profile, profile.cascade, profile.dense):
        for name, value in ((field.name, getattr(part, field.name)) for field in fields(part)):
            is_overhead = name in ("step_us", "group_us")
            if isinstance(value, int | float) and not (value >= 0 if is_overhead else value > 0):
                raise UnsupportedError(f"profile {file}: {name} is {value}; it must be positive")
    return profile
