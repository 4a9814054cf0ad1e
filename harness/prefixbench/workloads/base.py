"""What every workload is made of: prompts as token ids, their sizes, their settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from prefixbench.case import Settings
from prefixbench.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One request. `arrival_s` is the intended send time since the block's start: latency counts from it, so a slow
    server cannot delay its own load (coordinated omission). `prefix_id` None means that nothing is shared by design."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0
    prefix_id: int | None = None


@dataclass(frozen=True)
class Workload:
    """`primers` are prompts that put every shared prefix into the cache when they are sent beforehand.

    `note` holds what was realized: requests, tokens, measured sharing, and the parameters of anything drawn.
    """

    name: str
    requests: tuple[PromptSpec, ...]
    primers: tuple[tuple[int, ...], ...]
    note: Settings


@dataclass(frozen=True, slots=True)
class Sizes:
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    concurrency: int
    vocab_size: int

    _LEAST: ClassVar[dict[str, int]] = {
        "prefix_tokens": 0,
        "suffix_tokens": 0,
        "output_tokens": 1,
        "concurrency": 1,
        "vocab_size": 64,
    }

    def __post_init__(self) -> None:
        for name, least in self._LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"{name}={value}: must be at least {least}")
        if self.prefix_tokens + self.suffix_tokens == 0:
            raise UsageError("prefix_tokens=0 and suffix_tokens=0: a prompt needs at least one token")


@dataclass(frozen=True)
class Draft:
    """What one workload module returns; `build` adds the measured sharing."""

    requests: tuple[PromptSpec, ...]
    primers: tuple[tuple[int, ...], ...] = ()
    note: Settings | None = None


class Tokens:
    """Draws token ids. The first and last fiftieth of the vocabulary is left out: special tokens live there."""

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        margin = max(1, vocab_size // 50)
        self.low, self.high = margin, vocab_size - margin
        self.rng = rng

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(self.low, self.high, size=length).tolist())

    def texts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Texts whose first tokens all differ while the vocabulary lasts, so that none share a token by accident."""
        room = self.high - self.low
        firsts = self.rng.permutation(room) if len(lengths) <= room else self.rng.integers(0, room, size=len(lengths))
        return [
            (self.low + int(first), *self.text(length - 1)) if length else ()
            for first, length in zip(firsts, lengths, strict=False)
        ]


Options = TypeVar("Options", bound="DataclassInstance")


def parse_settings(workload: str, kind: type[Options], given: Settings) -> Options:
    """Builds the options of a workload; a setting that it does not have, or of another type, is refused."""
    known = {field.name: field for field in fields(kind)}
    for name, value in given.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise UsageError(f"workload {workload} has no setting {name!r}; allowed: {allowed}")
        if not _fits(value, str(known[name].type)):
            raise UsageError(f"workload {workload}: {name}={value!r} must be of type {known[name].type}")
    return kind(**given)


def _fits(value: str | int | float | bool | None, declared: str) -> bool:
    kinds = {part.strip() for part in declared.split("|")}
    if value is None:
        return "None" in kinds
    if isinstance(value, int) and not isinstance(value, bool):
        return bool(kinds & {"int", "float"})
    return type(value).__name__ in kinds
