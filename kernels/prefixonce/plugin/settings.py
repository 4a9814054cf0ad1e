"""What the operator sets, read once from the environment; a name or value we do not know stops the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from prefixonce.cost import Profile, load_profile
from prefixonce.errors import UnsupportedError
from prefixonce.plugin.faults import NO_FAULT, Fault
from prefixonce.step import Mode

_PREFIX = "PREFIXONCE_"


@dataclass(frozen=True)
class PluginSettings:
    """`mode` is only the start value: SGLang's set_internal_state call changes the path of a running server."""

    mode: Mode = Mode.AUTO
    dense_m_eff: int = 1024
    min_run_tokens: int = 64
    min_prefix_tokens: int = 1
    timers: bool = False
    profile: Profile | None = None
    fault: Fault = NO_FAULT

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PluginSettings:
        given = {name: value for name, value in environment.items() if name.startswith(_PREFIX)}
        unknown = sorted(set(given) - set(_READERS))
        if unknown:
            raise UnsupportedError(f"{unknown[0]} is unknown; allowed: {', '.join(_READERS)}")
        values: dict[str, Any] = {}
        for name, text in given.items():
            field, read = _READERS[name]
            values[field] = read(name, text)
        return cls(**values)


def _mode(_name: str, text: str) -> Mode:
    return Mode.parse(text)


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UnsupportedError(f"{name}={text!r} is not allowed; give a whole number of at least 1")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise UnsupportedError(f"{name}={text!r} is not allowed; give 0 or 1")
    return text == "1"


def _profile(_name: str, text: str) -> Profile:
    return load_profile(FilePath(text))


def _fault(_name: str, text: str) -> Fault:
    return Fault.parse(text)


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "PREFIXONCE_PATH": ("mode", _mode),
    "PREFIXONCE_DENSE_M_EFF": ("dense_m_eff", _positive),
    "PREFIXONCE_MIN_RUN_TOKENS": ("min_run_tokens", _positive),
    "PREFIXONCE_MIN_PREFIX_TOKENS": ("min_prefix_tokens", _positive),
    "PREFIXONCE_TIMERS": ("timers", _switch),
    "PREFIXONCE_PROFILE": ("profile", _profile),
    "PREFIXONCE_TEST_FAULT": ("fault", _fault),
}
