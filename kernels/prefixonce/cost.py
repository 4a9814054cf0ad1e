"""The cost model behind `auto`: microseconds of one layer from bytes, FLOPs and launch overheads; pure, no torch.

A profile holds a handful of physical parameters fitted on one GPU by `prefixbench calibrate`. Profiles of GPUs that
were measured ship with the package; any other device gets the conservative one, which shares only where the gain is
large on any hardware.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from prefixonce.errors import UnsupportedError
from prefixonce.step import DecodeStep, Path, PrefixGroup

SCHEMA = 2
OWN_TOKENS = 256
"""Tokens that a row is taken to have beside its prefix: a decision stands while rows grow, so it cannot follow them."""

SHIPPED = FilePath(__file__).parent / "profiles"
_KEY_BLOCK = 128  # keys that a thread block handles at a time; a prefix is not cut finer
_PARTIAL_BYTES = 2 * 2 * 4  # two fp32 partials of a query head and dimension, each written and read
_ELEMENT_BYTES = 2  # the plugin serves bfloat16 and float16 K/V


class Layer(NamedTuple):
    """One group in one layer: `contiguous_tokens` of the prefix lie in runs; head counts are per rank."""

    rows: int
    prefix_tokens: int
    contiguous_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    own_tokens: float = OWN_TOKENS

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * _ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class StockCost:
    """The wrapped decode kernel reads a shared prefix once from memory and for every other row from the L2.

    `row_us` is what a row costs per KV head on the whole device, however short it is.
    """

    launch_us: float
    row_us: float
    reread_bytes_per_us: float


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Our launches. `split_us`: one more cut of the prefix; `partial_bytes_per_us`: partials on their way to the merge.

    FLOP rates are of the whole device, through slot lists (cascade) and from contiguous runs (dense).
    """

    launch_us: float
    row_us: float
    split_us: float
    partial_bytes_per_us: float
    cascade_flops_per_us: float
    dense_flops_per_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`processors` and `tile_rows` are known, not fitted: the parts that work side by side, and the query rows that a
    prefix tile is padded to."""

    device: str
    source: str
    processors: int
    tile_rows: int
    memory_bytes_per_us: float
    stock: StockCost
    shared: SharedCost

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        """Cost of a group's rows on one layer, without what a step pays once (`step_us`)."""
        prefix, runs = group.prefix_tokens, group.contiguous_tokens
        layer = Layer(len(group.rows), prefix, runs, step.num_q_heads, step.num_kv_heads, step.head_dim)
        return self.layer_us(layer, path) - self._launch_us(path)

    def step_us(self, path: Path) -> float:
        """What a step pays once for sharing anything: its launches in place of stock's."""
        return self._launch_us(path) - self.stock.launch_us

    def layer_us(self, layer: Layer, path: Path) -> float:
        """One layer of a step that is this group alone. PAGED is priced like stock: nothing is shared."""
        if path in (Path.STOCK, Path.PAGED):
            first_us = layer.prefix_tokens * layer.token_bytes / self.memory_bytes_per_us
            reread_bytes = (layer.rows - 1) * layer.prefix_tokens * layer.token_bytes
            reread_us = reread_bytes / self.stock.reread_bytes_per_us
            return self.stock.launch_us + self._own_us(layer, self.stock.row_us) + first_us + reread_us
        partial_bytes = layer.rows * layer.q_heads * layer.head_dim * _PARTIAL_BYTES
        merge_us = partial_bytes / self.shared.partial_bytes_per_us
        own_us = self._own_us(layer, self.shared.row_us)
        return self.shared.launch_us + own_us + self._prefix_us(layer, path) + merge_us

    def _launch_us(self, path: Path) -> float:
        return self.stock.launch_us if path in (Path.STOCK, Path.PAGED) else self.shared.launch_us

    def _own_us(self, layer: Layer, row_us: float) -> float:
        """Two limits that overlap in part: a number of rows, and the bytes that only they read."""
        own_bytes = layer.rows * layer.own_tokens * layer.token_bytes
        return math.hypot(layer.rows * layer.kv_heads * row_us, own_bytes / self.memory_bytes_per_us)

    def _prefix_us(self, layer: Layer, path: Path) -> float:
        """Reading the prefix once: every tile of queries meets every key. Cutting the keys into more parts uses more
        of the device and makes more partials, so there is a best number of parts."""
        if not layer.prefix_tokens:
            return 0.0
        gqa = layer.q_heads // layer.kv_heads
        members = max(1, self.tile_rows // gqa)
        tiles = math.ceil(layer.rows / members)
        blocks = math.ceil(layer.prefix_tokens / _KEY_BLOCK)
        part_flops = 4 * members * gqa * blocks * _KEY_BLOCK * layer.head_dim * self.processors
        part_us = part_flops * self._us_per_flop(layer, path)  # one tile and KV head on one processor
        parts = min(math.sqrt(part_us / self.shared.split_us), blocks, self.processors / (tiles * layer.kv_heads))
        read_us = layer.prefix_tokens * layer.token_bytes / self.memory_bytes_per_us
        return math.hypot(part_us / parts, read_us) + self.shared.split_us * max(parts, 1.0)

    def _us_per_flop(self, layer: Layer, path: Path) -> float:
        runs = layer.contiguous_tokens / layer.prefix_tokens if path is Path.DENSE else 0.0
        return runs / self.shared.dense_flops_per_us + (1.0 - runs) / self.shared.cascade_flops_per_us

    def dump(self, file: FilePath, calibration: Mapping[str, object] | None = None) -> None:
        """`calibration` is how the profile was found, for people; no reader of a profile looks at it."""
        data = {"schema": SCHEMA, **asdict(self)} | ({"calibration": calibration} if calibration else {})
        file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


# Low rates and high overheads: a GPU for which nobody calibrated shares long prefixes among many requests only.
CONSERVATIVE = Profile(
    device="unknown",
    source="conservative defaults; `prefixbench calibrate` on this GPU fits better ones",
    processors=100,
    tile_rows=128,
    memory_bytes_per_us=2e6,
    stock=StockCost(launch_us=5.0, row_us=0.01, reread_bytes_per_us=12e6),
    shared=SharedCost(
        launch_us=30.0,
        row_us=0.01,
        split_us=0.3,
        partial_bytes_per_us=1e6,
        cascade_flops_per_us=60e6,
        dense_flops_per_us=100e6,
    ),
)


def profile_for(device: str) -> Profile:
    """The profile shipped for the GPU of this name, else the conservative one, whose `source` says what to do."""
    file = SHIPPED / f"{slug(device)}.json"
    if file.exists():
        profile = load_profile(file)
        if profile.device == device:
            return profile
    return CONSERVATIVE


def slug(device: str) -> str:
    """A device's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load_profile(file: FilePath) -> Profile:
    """Reads what `Profile.dump` wrote; one line names the file and the field that is wrong."""
    try:
        return _parse(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        allowed = ", ".join(field.name for kind in (Profile, StockCost, SharedCost) for field in fields(kind))
        raise UnsupportedError(f"profile {file}: {error}; a profile has the fields {allowed}") from error


def _parse(data: dict[str, Any]) -> Profile:
    schema = data.pop("schema", 1)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}, this version reads {SCHEMA}: calibrate again")
    data.pop("calibration", None)
    stock, shared = StockCost(**data.pop("stock")), SharedCost(**data.pop("shared"))
    profile = Profile(stock=stock, shared=shared, **data)
    for part in (profile, stock, shared):
        _check(part)
    return profile


def _check(part: Profile | StockCost | SharedCost) -> None:
    for name, value in ((field.name, getattr(part, field.name)) for field in fields(part)):
        if name in ("device", "source"):
            if not isinstance(value, str):
                raise TypeError(f"{name} is {value!r}; it must be text")
        elif name not in ("stock", "shared"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; it must be a positive number")
