"""Checks a composed configuration and hands it on as it was: validates, never rewrites."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prefixbench.config.run import AXES, PATHS, WATCH_CYCLE, RunConfig, parts
from prefixbench.errors import UsageError
from prefixbench.hints import unknown
from prefixbench.selection import RESERVED

_SERVER_CHOICES = {
    "model.weights": ("written", "dummy"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "gpus.device": ("cpu", "cuda"),
    "engine.name": ("sglang", "fake"),
    "engine.stock_backend": ("auto", "torch_native", "flashinfer", "fa3", "triton"),
}
_SERVER_AT_LEAST_ONE = (
    "model.hidden",
    "model.intermediate",
    "model.layers",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.vocab",
    "model.max_context",
    "gpus.count",
    "engine.page_size",
    "engine.max_running_requests",
    "engine.cuda_graph_max_bs",
    "engine.dense_m_eff",
    "engine.min_run_tokens",
)
_SERVER_ABOVE_ZERO = (
    "model.rope_theta",
    "engine.mem_fraction_static",
    "engine.start_timeout_s",
    "engine.stall_timeout_s",
)
_CHOICES = {
    "measure.name": ("decode",),
    "measure.warmup_scope": ("cell", "launch"),
    "measure.watch": ("always", "half"),
}
_AT_LEAST_ONE = (
    "launches",
    "measure.blocks",
    "measure.warmup_output_len",
    "measure.stream_interval",
)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_MOST_REPETITIONS = 10_000
_LARGEST_SEED = 2**31 - 1  # what every random generator of a server takes
SHORTEST_INTERVAL_S = 0.001


def load(composed: DictConfig) -> RunConfig:
    """Composed YAML to a checked RunConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, RunConfig):
        raise UsageError("the configuration does not start from the schema; keep `- schema` first in its defaults list")
    _refuse_added_keys(config, "")
    refuse_not_finite(config)
    check_server(config)
    for name, part in parts(config).items():
        try:
            _check_paths_of_part(config, name)
            _check_values(part)
            _check_combinations(part)
        except UsageError as error:
            raise UsageError(f"also.{name}: {error}" if name else str(error)) from None
    return config


def check_destination(runs: str, tag: str | None) -> None:
    """Where records go, and the name by which selectors find them."""
    folder = Path(runs)
    if not runs.strip() or ((folder.exists() or folder.is_symlink()) and not folder.is_dir()):
        raise UsageError(f"runs={runs!r} is no folder; name one that exists or can be made")
    if tag is not None and (tag in RESERVED or not _TAG.fullmatch(tag)):
        raise UsageError(
            f"tag={tag[:120]!r} could not be selected; allowed: up to 100 letters, digits and . _ + - after a letter "
            f"or digit, but not {' or '.join(RESERVED)}"
        )


def check_seed(seed: int) -> None:
    if not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed={seed}: must be from 0 to {_LARGEST_SEED}")


def check_server(config: RunConfig) -> None:
    """What model, GPUs and engine say, by themselves and together."""
    _check_choices(config, _SERVER_CHOICES, _SERVER_AT_LEAST_ONE)
    for key in _SERVER_ABOVE_ZERO:
        if _get(config, key) <= 0:
            raise UsageError(f"{key}={_get(config, key):g}: must be above 0")
    model, gpus, engine = config.model, config.gpus, config.engine
    if not model.name.strip():
        raise UsageError("model.name is blank: records need a name for their model")
    if model.heads % model.kv_heads:
        raise UsageError(f"model.heads={model.heads}: must be a multiple of model.kv_heads, which is {model.kv_heads}")
    if engine.mem_fraction_static >= 1:
        raise UsageError(f"engine.mem_fraction_static={engine.mem_fraction_static:g}: must be below 1")
    if engine.max_total_tokens is not None and engine.max_total_tokens < 1:
        raise UsageError(f"engine.max_total_tokens={engine.max_total_tokens}: must be at least 1, or null")
    if engine.chunked_prefill_size is not None and (engine.chunked_prefill_size < 1) != (
        engine.chunked_prefill_size == -1
    ):
        raise UsageError(f"engine.chunked_prefill_size={engine.chunked_prefill_size}: must be at least 1, -1 or null")
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


def refuse_not_finite(value: Any, key: str = "") -> None:
    """NaN and infinity, anywhere in a configuration: they pass every comparison and cannot be recorded."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key}={value}: a finite number is needed")
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_not_finite(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            refuse_not_finite(item, key)


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
    for key in ("launches", "measure.blocks", "measure.warmup_blocks"):
        if _get(config, key) > _MOST_REPETITIONS:
            raise UsageError(f"{key}={_get(config, key)}: at most {_MOST_REPETITIONS} are allowed")
    if config.measure.watch == "half" and config.measure.blocks % WATCH_CYCLE:
        raise UsageError(
            f"measure.blocks={config.measure.blocks}: measure.watch=half needs a multiple of {WATCH_CYCLE}, so that a "
            "machine that slows down favours neither the watched blocks nor the others"
        )
    check_seed(config.seed)
    if config.measure.telemetry_interval_s < SHORTEST_INTERVAL_S:
        interval_s = config.measure.telemetry_interval_s
        raise UsageError(f"measure.telemetry_interval_s={interval_s:g}: must be at least {SHORTEST_INTERVAL_S:g}")
    for name, value in config.workload.settings.items():
        if isinstance(value, list | dict):
            raise UsageError(f"workload.settings.{name}={value}: one value is needed, not several")
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
    if engine.max_total_tokens is not None and longest > engine.max_total_tokens:
        raise UsageError(
            f"prefix_len + suffix_len + output_len reaches {longest} tokens, more than the KV pool of "
            f"engine.max_total_tokens={engine.max_total_tokens} holds"
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
