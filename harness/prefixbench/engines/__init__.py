"""Engines under test: `base` is the interface, one module per engine, imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from prefixbench.config.run import RunConfig
from prefixbench.engines.base import Engine
from prefixbench.hints import unknown

_ENGINES = {"sglang": "prefixbench.engines.sglang", "fake": "prefixbench.engines.fake"}


def create(config: RunConfig) -> Engine:
    """The engine of this configuration; nothing is started."""
    if config.engine.name not in _ENGINES:
        raise unknown("engine", config.engine.name, _ENGINES)
    engine: Engine = import_module(_ENGINES[config.engine.name]).create(config)
    return engine
