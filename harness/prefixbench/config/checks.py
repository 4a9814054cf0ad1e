"""Checks a composed configuration and hands it on as it was: validates, never rewrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prefixbench.config.run import AXES, PATHS, RunConfig, parts
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

_SERVER_CHOICES = {
    "model.weights": ("written", "dummy"),
    "gpus.device": ("cpu", "cuda"),
    "engine.name": ("sglang", "fake"),
    "engine.stock_backend": ("auto", "torch_native", "flashinfer", "fa3", "triton"),
}
_SERVER_AT_LEAST_ONE = (
    "gpus.count",
    "engine.page_size",
    "engine.max_running_requests",
    "engine.cuda_graph_max_bs",
    "engine.dense_m_eff",
    "engine.min_run_tokens",
)
_CHOICES = {
    "measure.name": ("decode",),
    "measure.warmup_scope": ("cell", "launch"),
}
_AT_LEAST_ONE = (
    "launches",
    "measure.blocks",
    "measure.warmup_output_len",
    "measure.stream_interval",
)


def load(composed: DictConfig) -> RunConfig:
    """Composed YAML to a checked RunConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, RunConfig):
        raise UsageError("the configuration does not start from the schema; keep `- schema` first in its defaults list")
    _refuse_added_keys(config, "")
    check_server(config)
    for name, part in parts(config).items():
        try:
            _check_paths_of_part(config, name)
            _check_values(part)
            _check_combinations(part)
        except UsageError as error:
            raise UsageError(f"also.{name}: {error}" if name else str(error)) from None
    return config


def check_server(config: RunConfig) -> None:
    """What model, GPUs and engine say, by themselves and together."""
    _check_choices(config, _SERVER_CHOICES, _SERVER_AT_LEAST_ONE)
    model, gpus, engine = config.model, config.gpus, config.engine
    if gpus.device == "cpu" and gpus.count != 1:
        raise UsageError(f"gpus.device=cpu with gpus.count={gpus.count}: tensor parallelism needs GPUs; use gpus=2")
    if model.heads % gpus.count or model.kv_heads % gpus.count:
        raise UsageError(
            f"{model.name} has {model.heads} heads and {model.kv_heads} K/V heads, "
            f"which {gpus.count} GPUs cannot share evenly; choose another gpus="
        )
    if gpus.device == "cpu" and engine.stock_backend not in ("auto", "torch_native"):
        raise UsageError(f"engine.stock_backend={engine.stock_backend} needs a GPU; gpus=cpu allows auto, torch_native")
    if engine.side_by_side and gpus.device == "cuda" and engine.max_total_tokens is None:
        raise UsageError(
            "engine.side_by_side=true puts two servers on one GPU: say with engine.max_total_tokens how large the "
            "KV pool of each is, or the first takes the memory of the second"
        )


def values(config: RunConfig, axis: str) -> tuple[int, ...]:
    """The values of one axis, in the order given."""
    given = getattr(config, axis)
    listed = tuple(given) if isinstance(given, list) else (given,)
    least = 0 if axis in ("prefix_len", "suffix_len") else 1
    for value in listed:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{axis}={value!r}: allowed are whole numbers from {least}, one or a list")
    if not listed or len(set(listed)) != len(listed):
        raise UsageError(f"{axis}={list(listed)}: give at least one value, and each only once")
    return listed


def _check_paths_of_part(config: RunConfig, name: str) -> None:
    for path in (config.also[name].path if name else None) or ():
        if path not in config.path:
            raise unknown("path", path, config.path)


def _refuse_added_keys(group: Any, prefix: str) -> None:
    """`+key=value` adds any key in Hydra; a key that nobody reads would be a setting that does nothing."""
    known = [field.name for field in fields(group)]
    for name, value in vars(group).items():
        if name not in known:
            raise unknown("key", f"{prefix}{name}", known)
        if is_dataclass(value):
            _refuse_added_keys(value, f"{prefix}{name}.")


def _check_values(config: RunConfig) -> None:
    _check_choices(config, _CHOICES, _AT_LEAST_ONE)
    if config.measure.warmup_blocks < 0:
        raise UsageError(f"measure.warmup_blocks={config.measure.warmup_blocks}: must be 0 or more")
    if config.seed < 0:
        raise UsageError(f"seed={config.seed}: must be 0 or more")
    for axis in AXES:
        values(config, axis)


def _check_choices(config: RunConfig, choices: Mapping[str, Sequence[str]], at_least_one: Sequence[str]) -> None:
    for key, allowed in choices.items():
        if _get(config, key) not in allowed:
            raise unknown(key, str(_get(config, key)), allowed)
    for key in at_least_one:
        if _get(config, key) < 1:
            raise UsageError(f"{key}={_get(config, key)}: must be at least 1")


def _check_combinations(config: RunConfig) -> None:
    model, engine = config.model, config.engine
    if not config.path:
        raise UsageError(f"path is empty; allowed: one or more of {', '.join(PATHS)}")
    for name, path in config.path.items():
        if name not in PATHS:
            raise unknown("path", name, PATHS)
        allowed = ("both", "with", "without") if name == "stock" else ("with",)
        if path.plugin not in allowed:
            raise unknown(f"path.{name}.plugin", path.plugin, allowed)
    longest = sum(max(values(config, axis)) for axis in ("prefix_len", "suffix_len", "output_len"))
    if longest > model.max_context:
        raise UsageError(
            f"prefix_len + suffix_len + output_len reaches {longest} tokens; {model.name} takes {model.max_context}"
        )
    if max(values(config, "prefix_len")) + max(values(config, "suffix_len")) == 0:
        raise UsageError("prefix_len=0 with suffix_len=0: a prompt needs at least one token")
    if max(values(config, "concurrency")) > engine.max_running_requests:
        raise UsageError(
            f"concurrency={max(values(config, 'concurrency'))} is above "
            f"engine.max_running_requests={engine.max_running_requests}: the batch asked for could never run"
        )


def _get(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found
