"""Counts what every decode step really did, so that a run can prove which kernel served it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup


def shared_groups(step: DecodeStep, choice: Choice) -> tuple[PrefixGroup, ...]:
    """The groups whose prefix really is read once; rows of the others are served as if they had no group."""
    return tuple(
        group for group, path in zip(step.groups, choice.paths, strict=True) if path in (Path.CASCADE, Path.DENSE)
    )


# Reasons carry figures (M_eff, microseconds), so a long-lived server could meet ever new ones.
_MAX_REASONS = 64


@dataclass(slots=True)
class Counters:
    """Totals since the start or the last reset. Times are host seconds; None means not measured on this device."""

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

    def count_step(self, step: DecodeStep, choice: Choice, kv_token_bytes: int) -> None:
        """`kv_token_bytes`: K and V of one token over all layers of this rank."""
        self.steps[choice.path] += 1
        known = choice.reason in self.reasons or len(self.reasons) < _MAX_REASONS
        reason = choice.reason if known else "other reasons"
        self.reasons[reason] += 1
        if choice.path is Path.STOCK:
            self.stock_reasons[reason] += 1
        self.batch_histogram[step.batch_size] += 1
        self.decode_tokens += step.batch_size
        for group in shared_groups(step, choice):
            rows = len(group.rows)
            self.group_steps += 1
            self.prefix_tokens_read_once += group.prefix_tokens
            self.prefix_tokens_read_by_stock += rows * group.prefix_tokens
            self.bytes_saved += (rows - 1) * group.prefix_tokens * kv_token_bytes

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
            "attention_s": self.attention_s,
            "prefix_s": self.prefix_s,
            "plan_s": self.plan_s,
            "reasons": dict(self.reasons),
        }
