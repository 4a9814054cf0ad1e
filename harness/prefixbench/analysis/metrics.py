"""Raw request samples of one block -> its figures. A figure that is not defined is None and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixbench.analysis.quantity import Quantity
from prefixbench.record import Block, RequestSample

Array = npt.NDArray[np.float64]

# A batch size that produced less of the decode tokens than this does not speak for the block.
MIN_STEADY_SHARE = 0.25

# Tokens that arrive this much faster than in half of the steady time, at its very beginning, are a backlog.
BACKLOG_RATE = 1.25
_GRID = 41


@dataclass(frozen=True)
class BlockMetrics:
    """Figures of one block; failed requests and requests sent before the block began are counted, never included.

    `decode_tok_s` is the steady rate: tokens per second while exactly `steady_batch` requests decode, the batch size
    that produced most tokens. `decode_tok_s_whole` spans first token to last token of the block, thin tail and prefill
    stalls included. Both leave out each request's first token, which belongs to prefill. `end_to_end_tok_s` counts
    every output token from the first request sent. `tpot_ms` and `ttft_ms` are means over requests.
    """

    decode_tok_s: Quantity
    steady_batch: int | None
    steady_s: float | None
    decode_tok_s_whole: Quantity
    end_to_end_tok_s: Quantity
    tpot_ms: Quantity
    ttft_ms: Quantity
    realized_batch: Quantity
    batch_source: str
    completed: int
    failed: int
    warmup_in_flight: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int | None
    token_source: str | None


@dataclass(frozen=True)
class Latencies:
    """Milliseconds per completed request: time to first token, per further token, and whole."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...]


@dataclass(frozen=True)
class _Stream:
    """Cumulative tokens of one request at arrival times, from its first token on."""

    sent_s: float
    first_s: float
    last_s: float
    at_s: Array
    tokens: Array
    decoded: float
    output_tokens: int


def block_metrics(block: Block) -> BlockMetrics:
    """Figures of one block from its raw samples, and its realized batch from counters where there are any."""
    measured = measured_requests(block)
    streams = _streams(measured)
    latencies = _latencies(streams)
    pieces = _pieces(streams)
    steady_batch = pieces.steady_batch()
    histogram = block.counters.batch_histogram if block.counters else {}
    realized = realized_batch(histogram) if histogram else steady_batch
    warmup = [r for r in block.requests if r.error is None and r.sent_s < 0]
    cached = [r.cached_tokens for r in measured]
    return BlockMetrics(
        decode_tok_s=_steady_rate(pieces, steady_batch),
        steady_batch=steady_batch,
        steady_s=None if steady_batch is None else float(pieces.at(steady_batch).seconds.sum()),
        decode_tok_s_whole=_whole_rate(streams),
        end_to_end_tok_s=_end_to_end(streams),
        tpot_ms=_mean(latencies.tpot_ms, "no decode step"),
        ttft_ms=_mean(latencies.ttft_ms, "no request finished"),
        realized_batch=Quantity(realized, None if realized else "no decode step was observed"),
        batch_source="counters" if histogram else "client",
        completed=len(measured),
        failed=sum(r.error is not None for r in block.requests),
        warmup_in_flight=len(warmup),
        output_tokens=sum(r.output_tokens for r in measured),
        prompt_tokens=sum(r.prompt_tokens for r in measured),
        cached_tokens=sum(c for c in cached if c is not None) if cached and None not in cached else None,
        token_source=_weakest_source(measured),
    )


def request_latencies(block: Block) -> Latencies:
    """Latencies of the completed requests, for percentiles."""
    return _latencies(_streams(measured_requests(block)))


def measured_requests(block: Block) -> list[RequestSample]:
    """Requests that count: completed, and sent inside the block (a negative `sent_s` is warm-up still in flight)."""
    return [r for r in block.requests if r.error is None and r.sent_s >= 0]


def realized_batch(histogram: Mapping[int, int]) -> int | None:
    """The batch size that produced most tokens; steps alone would favour the thin tail of a run."""
    if not any(histogram.values()):
        return None
    return max(histogram, key=lambda batch: (batch * histogram[batch], batch))


def _streams(requests: Sequence[RequestSample]) -> list[_Stream]:
    streams = []
    for request in requests:
        chunks = [chunk for chunk in request.chunks if chunk[0] > 0]
        if not chunks:
            continue
        counts, at_s = zip(*chunks, strict=True)
        # The server's own count is authoritative: chunks are not tokens.
        whole = max(request.output_tokens, counts[0])
        tokens = np.minimum(np.array((*counts[:-1], whole), dtype=np.float64), whole)
        streams.append(
            _Stream(
                sent_s=request.sent_s,
                first_s=at_s[0],
                last_s=at_s[-1],
                at_s=np.array(at_s, dtype=np.float64),
                tokens=tokens,
                decoded=float(tokens[-1] - tokens[0]),
                output_tokens=request.output_tokens,
            )
        )
    return streams


@dataclass(frozen=True)
class _Pieces:
    """A block cut into pieces of time in which the same number of requests decode; arrays in order of time."""

    level: npt.NDArray[np.int64]
    tokens: Array
    seconds: Array

    def steady_batch(self) -> int | None:
        """The batch size that produced most tokens, the larger one of equals."""
        tokens = np.bincount(self.level, self.tokens) if len(self.level) else np.zeros(1)
        return int(len(tokens) - 1 - np.argmax(tokens[::-1])) if tokens.any() else None

    def at(self, batch: int) -> _Pieces:
        chosen = self.level == batch
        return _Pieces(self.level[chosen], self.tokens[chosen], self.seconds[chosen])

    def without_backlog(self) -> _Pieces:
        """Leaves out what a client that had stopped reading gets at once when it goes on: made before, not now."""
        rate = self.tokens / self.seconds
        order = np.argsort(rate)
        middle = rate[order[np.searchsorted(np.cumsum(self.seconds[order]), self.seconds.sum() / 2)]]
        begin = int(np.argmax(rate <= BACKLOG_RATE * middle))
        return _Pieces(self.level[begin:], self.tokens[begin:], self.seconds[begin:])


def _pieces(streams: Sequence[_Stream]) -> _Pieces:
    """Tokens between two arrivals are spread evenly: a few milliseconds of jitter at either end cost nothing."""
    decoding = [s for s in streams if s.last_s > s.first_s]
    if not decoding:
        return _Pieces(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    first = np.array([s.first_s for s in decoding])
    last = np.array([s.last_s for s in decoding])
    edges = np.unique(np.concatenate([first, last, np.linspace(first.min(), last.max(), _GRID)]))
    produced = np.diff(np.sum([np.interp(edges, s.at_s, s.tokens) for s in decoding], axis=0))
    started = np.searchsorted(np.sort(first), edges[:-1], side="right")
    ended = np.searchsorted(np.sort(last), edges[:-1], side="right")
    level = (started - ended).astype(np.int64)
    running = level > 0
    return _Pieces(level[running], produced[running], np.diff(edges)[running])


def _steady_rate(pieces: _Pieces, batch: int | None) -> Quantity:
    if batch is None:
        return Quantity(None, "no decode step")
    steady = pieces.at(batch)
    share = float(steady.tokens.sum() / pieces.tokens.sum())
    if share < MIN_STEADY_SHARE:
        return Quantity(None, f"the batch never settled: the commonest size, {batch}, made {share:.0%} of the tokens")
    steady = steady.without_backlog()
    return Quantity(float(steady.tokens.sum() / steady.seconds.sum()))


def _whole_rate(streams: Sequence[_Stream]) -> Quantity:
    tokens = sum(s.decoded for s in streams)
    span_s = max(s.last_s for s in streams) - min(s.first_s for s in streams) if streams else 0.0
    return Quantity(tokens / span_s) if tokens > 0 and span_s > 0 else Quantity(None, "no decode step")


def _end_to_end(streams: Sequence[_Stream]) -> Quantity:
    if not streams:
        return Quantity(None, "no request finished")
    span_s = max(s.last_s for s in streams) - min(s.sent_s for s in streams)
    return Quantity(sum(s.output_tokens for s in streams) / span_s) if span_s > 0 else Quantity(None, "no time passed")


def _latencies(streams: Sequence[_Stream]) -> Latencies:
    return Latencies(
        ttft_ms=tuple(1e3 * (s.first_s - s.sent_s) for s in streams),
        tpot_ms=tuple(1e3 * (s.last_s - s.first_s) / s.decoded for s in streams if s.decoded > 0),
        end_to_end_ms=tuple(1e3 * (s.last_s - s.sent_s) for s in streams),
    )


def _mean(values: Sequence[float], reason: str) -> Quantity:
    return Quantity(float(np.mean(values))) if values else Quantity(None, reason)


def _weakest_source(requests: Sequence[RequestSample]) -> str | None:
    sources = {r.token_source for r in requests}
    return next((source for source in ("estimated", "ids", "usage") if source in sources), None)
