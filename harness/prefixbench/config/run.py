"""The typed configuration of `prefixbench run`: one dataclass per group, and where its YAML lies."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

PATHS = ("stock", "paged", "cascade", "dense", "full", "auto")
AXES = ("prefix_len", "suffix_len", "output_len", "concurrency")
"""What one server can measure side by side, besides the path."""
WATCH_CYCLE = 4
"""Blocks after which the order of those with telemetry and those without repeats, where measure.watch is half."""


@dataclass
class ModelConfig:
    name: str = MISSING
    weights: str = MISSING
    path: str | None = None
    architecture: str = MISSING
    hidden: int = MISSING
    intermediate: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    vocab: int = MISSING
    max_context: int = MISSING
    rope_theta: float = MISSING
    weights_seed: int = MISSING
    dtype: str = MISSING


@dataclass
class GpusConfig:
    device: str = MISSING
    count: int = MISSING


@dataclass
class EngineConfig:
    name: str = MISSING
    stock_backend: str = MISSING
    page_size: int = MISSING
    max_running_requests: int = MISSING
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    mem_fraction_static: float = MISSING
    cuda_graph: bool = MISSING
    cuda_graph_max_bs: int = MISSING
    dense_m_eff: int = MISSING
    min_run_tokens: int = MISSING
    timers: bool = MISSING
    tokenizer: bool = False
    side_by_side: bool = False
    freeze_gc: bool = False
    start_timeout_s: float = MISSING
    stall_timeout_s: float = MISSING
    extra_args: list[str] = field(default_factory=list)


@dataclass
class PathConfig:
    plugin: str = MISSING


@dataclass
class WorkloadConfig:
    name: str = MISSING
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class MeasureConfig:
    name: str = MISSING
    blocks: int = MISSING
    warmup_blocks: int = MISSING
    warmup_scope: str = MISSING
    warmup_output_len: int = MISSING
    stream_interval: int = MISSING
    telemetry_interval_s: float = MISSING
    watch: str = "always"


@dataclass
class PartConfig:
    """More cells for the same servers to measure; what is None is as in the whole."""

    workload: WorkloadConfig | None = None
    path: list[str] | None = None
    prefix_len: Any = None
    suffix_len: Any = None
    output_len: Any = None
    concurrency: Any = None


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    gpus: GpusConfig = field(default_factory=GpusConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    path: dict[str, PathConfig] = field(default_factory=dict)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    prefix_len: Any = MISSING  # OmegaConf has no type for "an int or a list of ints"; `values` checks it
    suffix_len: Any = MISSING
    output_len: Any = MISSING
    concurrency: Any = MISSING
    also: dict[str, PartConfig] = field(default_factory=dict)
    launches: int = MISSING
    seed: int = MISSING
    resume: bool = MISSING
    tag: str | None = None
    runs: str = MISSING
    run_id: str = MISSING
    typed: list[str] = field(default_factory=list)


def register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=RunConfig)


def parts(config: RunConfig) -> dict[str, RunConfig]:
    """The configuration without `also` under "", and by their names the parts of it, each as a whole configuration.

    A path that the whole does not have is left out of a part; `checks` refuses it.
    """
    whole = replace(config, also={})
    return {"": whole} | {name: _whole(whole, part) for name, part in config.also.items()}


def _whole(config: RunConfig, part: PartConfig) -> RunConfig:
    given = {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) is not None}
    if part.path is not None:
        given["path"] = {name: config.path[name] for name in part.path if name in config.path}
    return replace(config, **given)
