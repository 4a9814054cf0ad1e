"""The entry point SGLang calls in every process; it imports nothing until called, so that it can fail loudly."""

from __future__ import annotations

import os

_ADAPTERS = {"0.5.16": "prefixonce.plugin.sglang_0516.hooks"}


def activate() -> None:
    """Registers the plugin. SGLang logs and survives ordinary errors of a plugin and would then serve stock under
    our name, so every error becomes a SystemExit with one line."""
    try:
        _activate(os.environ)
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"prefixonce: {line}") from error


def adapter_for(version: str) -> str:
    """Name of the module that knows this SGLang version from inside."""
    from prefixonce.errors import UnsupportedError

    if version not in _ADAPTERS:
        raise UnsupportedError(
            f"SGLang {version} is unknown; allowed: {', '.join(_ADAPTERS)}. "
            "To start SGLang without prefixonce, set SGLANG_PLUGINS=none"
        )
    return _ADAPTERS[version]


def _activate(environment: os._Environ[str]) -> None:
    from importlib import import_module

    import sglang

    from prefixonce.plugin.runtime import Runtime
    from prefixonce.plugin.settings import PluginSettings

    adapter = import_module(adapter_for(sglang.__version__))
    settings = PluginSettings.from_environment(environment)
    adapter.Plugin(Runtime(settings), sglang.__version__).install()
