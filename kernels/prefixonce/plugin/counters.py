"""Counts what every decode step really did, so that a run can prove which kernel served it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from prefixonce.step import Choice, DecodeStep, Path, Sharing

# Reasons carry figures (M_eff, microseconds), so a long-lived server could meet ever new ones.
_MAX_REASONS = 64


@dataclass(slots=True)
class Counters:
    """Totals since the start or the last reset. `plan_s` is host time; None means not measured on this device."""

    steps: Counter[Path] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    stock_reasons: Counter[str] = field(default_factory=Counter)
    batch_histogram: Counter[int] = field(default_factory=Counter)
    decode_tokens: int = 0
    group_steps: int = 0
    prefix_tokens_read_once: int = 0
    prefix_tokens_read_by_stock: int = 0
    bytes_saved: int = 0
    plan_s: float = 0.0
    decode_s: float | None = None
    attention_s: float | None = None
    prefix_s: float | None = None
    attention_is_whole: bool = True  # False once a step of `decode_s` is missing in `attention_s`

    def add_seconds(self, name: Literal["decode_s", "attention_s", "prefix_s"], seconds: float) -> None:
        setattr(self, name, (getattr(self, name) or 0.0) + seconds)

    def count_step(self, step: DecodeStep, choice: Choice, sharing: Sharing, kv_token_bytes: int) -> None:
        """`kv_token_bytes`: K and V of one token over all layers of this rank."""
        self.steps[choice.path] += 1
        known = choice.reason in self.reasons or len(self.reasons) < _MAX_REASONS
        reason = choice.reason if known else "other reasons"
        self.reasons[reason] += 1
        if choice.path is Path.STOCK:
            self.stock_reasons[reason] += 1
        self.batch_histogram[step.batch_size] += 1
        self.decode_tokens += step.batch_size
        self.group_steps += len(sharing.groups)
        self.prefix_tokens_read_once += sharing.tokens_once
        self.prefix_tokens_read_by_stock += sharing.tokens_per_row
        self.bytes_saved += (sharing.tokens_per_row - sharing.tokens_once) * kv_token_bytes

    def to_json(self) -> dict[str, object]:
        return {
            "steps": {path.value: self.steps[path] for path in Path},
            "decode_tokens": self.decode_tokens,
            "group_steps": self.group_steps,
            "prefix_tokens_read_once": self.prefix_tokens_read_once,
            "prefix_tokens_read_by_stock": self.prefix_tokens_read_by_stock,
            "bytes_saved": self.bytes_saved,
            "batch_histogram": {str(batch): count for batch, count in sorted(self.batch_histogram.items())},
            "decode_s": self.decode_s,
            "attention_s": self.attention_s if self.attention_is_whole else None,
            "prefix_s": self.prefix_s,
            "plan_s": self.plan_s,
            "reasons": dict(self.reasons),
        }
