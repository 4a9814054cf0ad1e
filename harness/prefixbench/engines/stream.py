"""Counts the tokens of one streamed answer. Chunks are not tokens: the server's own count is what is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from prefixbench.record import RequestSample

TokenSource = Literal["usage", "ids", "estimated"]
_MOST_TOKENS = 2**40


class StreamCounter:
    """Fed with the payloads of one request in order; seconds count from the block's start."""

    def __init__(self, sent_s: float, prompt_tokens: int) -> None:
        self._sent_s = sent_s
        self._prompt_tokens = prompt_tokens
        self._cached_tokens: int | None = None
        self._finish_reason: str | None = None
        self._source: TokenSource = "estimated"
        self._ids: list[int] = []
        self._tokens = 0
        self._chunks: list[tuple[int, float]] = []

    def feed(self, payload: Mapping[str, Any], at_s: float) -> None:
        """ValueError for a count or a reason that is none; what came before it stays."""
        meta = payload.get("meta_info") or {}
        if not isinstance(meta, Mapping):
            raise ValueError(f"meta_info is {meta!r:.100}, not an object")  # noqa: TRY004 - the server's fault, not a type
        self._prompt_tokens = _whole(meta, "prompt_tokens", self._prompt_tokens)
        if meta.get("cached_tokens") is not None:
            self._cached_tokens = _whole(meta, "cached_tokens", 0)
        tokens = self._count(payload, meta)
        if tokens > self._tokens:
            self._tokens = tokens
            self._chunks.append((tokens, at_s))
        reason = meta.get("finish_reason")
        if reason is not None:
            self._finish_reason = str(reason.get("type", reason) if isinstance(reason, Mapping) else reason)

    def sample(self, error: str | None = None) -> RequestSample:
        if error is None and self._finish_reason is None:
            error = "the answer ended without a finish reason"
        if error is None and self._finish_reason == "abort":
            error = "the server aborted the request"
        return RequestSample(
            sent_s=self._sent_s,
            chunks=tuple(self._chunks),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._tokens,
            token_source=self._source,
            finish_reason=self._finish_reason,
            error=error,
        )

    def _count(self, payload: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        if meta.get("completion_tokens") is not None:
            self._source = "usage"
            return _whole(meta, "completion_tokens", 0)
        if isinstance(ids := payload.get("output_ids"), list):
            self._source = "ids"
            is_cumulative = ids[: len(self._ids)] == self._ids
            self._ids = list(ids) if is_cumulative else self._ids + list(ids)
            return len(self._ids)
        return self._tokens + bool(payload.get("text"))


def _whole(meta: Mapping[str, Any], name: str, default: int) -> int:
    """A count as the server gives it; anything else could not be recorded."""
    count = meta.get(name)
    if count is None:
        return default
    if not isinstance(count, int) or not 0 <= count <= _MOST_TOKENS:
        raise ValueError(f"{name} is {count!r:.100}, not a count of tokens")
    return count
