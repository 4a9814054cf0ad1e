"""conf/gate.yaml -> GateConfig; unknown keys and impossible values are one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from prefixbench.analysis.frame import HIGHER_IS_BETTER
from prefixbench.analysis.gate.family import Rule
from prefixbench.analysis.gate.judge import GateConfig
from prefixbench.config import config_dir
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

DEFAULT_FILE = config_dir() / "gate.yaml"
_RULE = {field.name for field in fields(Rule)}
_LISTS = {"metrics", "exclude", "under_test", "allow"}
_LIMITS = {
    "alpha": (0.0, 0.5),
    "min_magnitude": (0.0, 0.99),
    "margin": (0.0, 0.99),
    "primary_weight": (0.0, 1.0),
    "pass_confidence": (0.5, 1.0),
}


def load_config(file: Path = DEFAULT_FILE, overrides: Mapping[str, object] | None = None) -> GateConfig:
    """Reads the file; `overrides` replace single values."""
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{file}: a mapping is needed, as in {DEFAULT_FILE.name}")
    return _config({**data, **(overrides or {})})


def as_mapping(config: GateConfig) -> dict[str, object]:
    """The inverse: one flat mapping, as in the file."""
    flat = asdict(config)
    rule = flat.pop("rule")
    return {**rule, **{name: list(value) if name in _LISTS else value for name, value in flat.items()}}


def _config(data: Mapping[str, Any]) -> GateConfig:
    allowed = {*_RULE, *_LISTS, "primary"}
    for name in data:
        if name not in allowed:
            raise unknown("gate setting", str(name), allowed)
    for name, (low, high) in _LIMITS.items():
        value = data.get(name, (low + high) / 2)
        if not isinstance(value, int | float) or not low < value < high:
            raise UsageError(f"gate setting {name}={value!r}: a number between {low:g} and {high:g} is needed")
    launches = data.get("min_launches", 2)
    if not isinstance(launches, int) or launches < 2:
        raise UsageError(f"gate setting min_launches={launches!r}: at least 2, one launch has no error bar")
    for metric in (*data.get("metrics", ()), *filter(None, [data.get("primary")])):
        if metric not in HIGHER_IS_BETTER:
            raise unknown("metric", str(metric), HIGHER_IS_BETTER)
    lists: dict[str, Any] = {name: tuple(data[name] or ()) for name in _LISTS & data.keys()}
    primary: dict[str, Any] = {name: data[name] for name in ("primary",) if name in data}
    return GateConfig(rule=Rule(**{name: data[name] for name in _RULE & data.keys()}), **lists, **primary)
