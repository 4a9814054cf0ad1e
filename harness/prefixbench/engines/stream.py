"""Counts the tokens of one streamed answer. Chunks are not tokens: the server's own count is what is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from prefixbench.record import RequestSample

TokenSource = Literal["usage", "ids", "estimated"]


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
        meta = payload.get("meta_info") or {}
        tokens = self._count(payload, meta)
        if tokens > self._tokens:
            self._tokens = tokens
            self._chunks.append((tokens, at_s))
        self._prompt_tokens = meta.get("prompt_tokens", self._prompt_tokens)
        self._cached_tokens = meta.get("cached_tokens", self._cached_tokens)
        reason = meta.get("finish_reason")
        if reason is not None:
            self._finish_reason = reason["type"] if isinstance(reason, Mapping) else str(reason)

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
        if (usage := meta.get("completion_tokens")) is not None:
            self._source = "usage"
            return int(usage)
        if (ids := payload.get("output_ids")) is not None:
            self._source = "ids"
            is_cumulative = ids[: len(self._ids)] == self._ids
            self._ids = list(ids) if is_cumulative else self._ids + list(ids)
            return len(self._ids)
        return self._tokens + bool(payload.get("text"))
