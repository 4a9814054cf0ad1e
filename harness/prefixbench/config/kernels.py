"""The typed configuration of `prefixbench kernels`, and the cases that it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from prefixbench.config.checks import SHORTEST_INTERVAL_S, check_destination, check_seed, refuse_not_finite
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

NUMBERS = ("prefix_len", "suffix_len", "batch", "q_heads", "kv_heads", "head_dim", "page_size")
NAMES = ("dtype", "layout", "implementation")
AXES = (*NUMBERS, *NAMES)
EVERYTHING = "all"
"""`implementation=all`: every one that serves the shape on this device."""


@dataclass
class KernelsConfig:
    device: str = MISSING
    grids: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Axes: a value or a list of values. OmegaConf has no type for that; `axis_values` checks them.
    prefix_len: Any = MISSING
    suffix_len: Any = MISSING
    batch: Any = MISSING
    q_heads: Any = MISSING
    kv_heads: Any = MISSING
    head_dim: Any = MISSING
    page_size: Any = MISSING
    dtype: Any = MISSING
    layout: Any = MISSING
    implementation: Any = MISSING
    l2: list[str] = MISSING
    launches_per_graph: int = MISSING
    warmup: int = MISSING
    repetitions: int = MISSING
    counters: bool = MISSING
    counters_budget_s: float = MISSING
    compile_ahead: bool = MISSING
    budget_s: float = MISSING
    telemetry_interval_s: float = MISSING
    seed: int = MISSING
    tag: str | None = None
    runs: str = MISSING
    run_id: str = MISSING


@dataclass(frozen=True)
class Request:
    """One point of a grid, not yet tied to a device. `implementation` may be EVERYTHING."""

    prefix_len: int
    suffix_len: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    layout: str
    implementation: str


def register_schema() -> None:
    ConfigStore.instance().store(name="kernels_schema", node=KernelsConfig)


def load(composed: DictConfig) -> KernelsConfig:
    """Composed YAML to a checked KernelsConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, KernelsConfig):
        raise UsageError("the configuration does not start from kernels_schema; keep it first in the defaults list")
    refuse_not_finite(config)
    check_destination(config.runs, config.tag)
    check_seed(config.seed)
    if config.device not in ("auto", "cuda", "cpu"):
        raise unknown("device", config.device, ("auto", "cuda", "cpu"))
    for cache in config.l2:
        if cache not in ("warm", "cold"):
            raise unknown("l2", cache, ("warm", "cold"))
    for name, least in (
        ("launches_per_graph", 1),
        ("warmup", 0),
        ("repetitions", 1),
        ("budget_s", 1),
        ("counters_budget_s", 0),
    ):
        if getattr(config, name) < least:
            raise UsageError(f"{name}={getattr(config, name)}: must be at least {least}")
    if config.telemetry_interval_s < SHORTEST_INTERVAL_S:
        raise UsageError(
            f"telemetry_interval_s={config.telemetry_interval_s:g}: must be at least {SHORTEST_INTERVAL_S:g}"
        )
    if len(set(config.l2)) != len(config.l2):
        raise UsageError(f"l2={config.l2}: give each state only once")
    if not config.l2:
        raise UsageError("l2=[]: allowed are warm and cold, one or both")
    requests(config)
    return config


def requests(config: KernelsConfig) -> tuple[Request, ...]:
    """Every point of every grid, each once. A grid replaces the axes it names; the others are the configuration's."""
    points: dict[Request, None] = {}
    for name, grid in (config.grids or {"axes": {}}).items():
        for axis in grid:
            if axis not in AXES:
                raise unknown(f"axis of grid {name}", axis, AXES)
        lists = [axis_values(axis, grid[axis] if axis in grid else getattr(config, axis)) for axis in AXES]
        points |= dict.fromkeys(Request(*point) for point in product(*lists))
    return tuple(points)


def axis_values(axis: str, given: object) -> tuple[Any, ...]:
    """The values of one axis, in the order given."""
    listed: Iterable[object] = given if isinstance(given, list) else (given,)
    values = tuple(listed)
    for value in values:
        is_right = isinstance(value, str) if axis in NAMES else isinstance(value, int) and not isinstance(value, bool)
        if not is_right:
            kind = "names" if axis in NAMES else "whole numbers"
            raise UsageError(f"{axis}={value!r}: allowed are {kind}, one or a list")
    if not values or len(set(values)) != len(values):
        raise UsageError(f"{axis}={list(values)}: give at least one value, and each only once")
    return values
