"""The typed configuration of `prefixbench dispatch`, and the cases that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import get_args

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from prefixbench.case import Change, DispatchCase
from prefixbench.config.checks import check_destination
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

DEVICES = ("auto", "cuda", "cpu")
MODES = ("stock", "paged", "cascade", "dense", "full", "auto")


@dataclass
class DispatchConfig:
    mode: list[str] = MISSING
    groups: list[int] = MISSING
    batch: list[int] = MISSING
    change: list[str] = MISSING
    prefix_len: int = MISSING
    suffix_len: int = MISSING
    q_heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    device: str = MISSING
    processors: int = MISSING
    steps: int = MISSING
    warmup: int = MISSING
    against: str = MISSING
    tag: str | None = None
    runs: str = MISSING
    run_id: str = MISSING


def register_schema() -> None:
    ConfigStore.instance().store(name="dispatch_schema", node=DispatchConfig)


def load(composed: DictConfig) -> DispatchConfig:
    """Composed YAML to a checked DispatchConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, DispatchConfig):
        raise UsageError("the configuration does not start from dispatch_schema; keep it first in the defaults list")
    check_destination(config.runs, config.tag)
    for name, given, allowed in (
        ("device", [config.device], DEVICES),
        ("mode", config.mode, MODES),
        ("change", config.change, get_args(Change)),
    ):
        for value in given:
            if value not in allowed:
                raise unknown(name, value, allowed)
    for name in ("mode", "groups", "batch", "change"):
        values = getattr(config, name)
        if not values or len(set(values)) != len(values):
            raise UsageError(f"{name}={list(values)}: give at least one value, and each only once")
    positive = dict.fromkeys(("prefix_len", "suffix_len", "kv_heads", "head_dim", "processors"), 1)
    for name, least in {**positive, "steps": 2, "warmup": 0}.items():
        if getattr(config, name) < least:
            raise UsageError(f"{name}={getattr(config, name)}: must be at least {least}")
    if config.q_heads < 1 or config.q_heads % config.kv_heads:
        raise UsageError(f"q_heads={config.q_heads}: must be a multiple of kv_heads, which is {config.kv_heads}")
    if min([*config.batch, 1]) < 1 or min([*config.groups, 0]) < 0:
        raise UsageError(f"batch={config.batch} groups={config.groups}: batch starts at 1, groups at 0: nothing shared")
    cases(config, "cpu", config.processors)
    return config


def cases(config: DispatchConfig, device: str, processors: int) -> tuple[DispatchCase, ...]:
    """Every combination in which each group has two rows or more."""
    made = tuple(
        DispatchCase(
            mode=mode,
            groups=groups,
            batch=batch,
            change=change,  # type: ignore[arg-type]  # checked by `load`
            prefix_tokens=config.prefix_len,
            suffix_tokens=config.suffix_len,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            settings={"device": device, "processors": processors},
        )
        for mode, groups, batch, change in product(config.mode, config.groups, config.batch, config.change)
        if 2 * groups <= batch
    )
    if not made:
        raise UsageError(f"batch={config.batch} groups={config.groups}: no batch has two rows for each of its groups")
    return made
