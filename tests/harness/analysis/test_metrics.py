"""Counting and timing: the right figure of each trace, and the wrong one that a naive count would give."""

from __future__ import annotations

import pytest

from harness.builders import block, counters, request
from prefixbench.analysis.metrics import block_metrics, measured_requests, realized_batch, request_latencies
from prefixbench.record import RequestSample


def test_usage_counts_not_chunks() -> None:
    """3 tokens in 2 chunks and an empty one."""
    sample = RequestSample(0.0, ((0, 0.5), (1, 1.0), (3, 2.0)), 10, 0, 3, "usage", "stop")
    metrics = block_metrics(block([sample]))
    assert (metrics.output_tokens, metrics.token_source) == (3, "usage")
    assert metrics.decode_tok_s.value == pytest.approx(2 / 1.0)
    assert metrics.ttft_ms.value == pytest.approx(1000.0), "the empty chunk is not the first token"


def test_server_count_overrides_a_short_chunk_count() -> None:
    sample = RequestSample(0.0, ((1, 1.0), (2, 2.0)), 10, 0, 3, "usage", "stop")
    assert block_metrics(block([sample])).decode_tok_s_whole.value == pytest.approx(2.0)


def test_estimated_counts_are_marked() -> None:
    exact = RequestSample(0.0, ((1, 1.0), (3, 2.0)), 10, 0, 3, "usage", "stop")
    guessed = RequestSample(0.0, ((1, 1.0), (3, 2.0)), 10, 0, 3, "estimated", "stop")
    assert block_metrics(block([exact, guessed])).token_source == "estimated"


def test_first_token_belongs_to_prefill() -> None:
    """32 requests x 128 tokens, 2 s prefill, 4 s decode: 1016 decode, 682.7 end to end, never 1024."""
    metrics = block_metrics(block([request(2.0, 4.0 / 127, 128)] * 32))
    assert metrics.decode_tok_s.value == pytest.approx(1016)
    assert metrics.decode_tok_s_whole.value == pytest.approx(1016)
    assert metrics.end_to_end_tok_s.value == pytest.approx(4096 / 6)
    assert metrics.tpot_ms.value == pytest.approx(4000 / 127)


def test_one_output_token_has_no_decode_rate() -> None:
    metrics = block_metrics(block([request(0.5, 0.01, 1)] * 4))
    for figure in (metrics.decode_tok_s, metrics.decode_tok_s_whole, metrics.tpot_ms):
        assert figure.value is None
        assert figure.reason == "no decode step"
    assert metrics.end_to_end_tok_s.value == pytest.approx(8.0)


def test_thin_tail_does_not_drag_the_steady_rate() -> None:
    """10 ms steps; 31 requests end at 128 tokens, one at 2048."""
    requests = [request(0.01, 0.01, 128)] * 31 + [request(0.01, 0.01, 2048)]
    metrics = block_metrics(block(requests))
    assert metrics.end_to_end_tok_s.value == pytest.approx(6016 / 20.48)
    assert metrics.decode_tok_s.value == pytest.approx(3200)
    assert metrics.steady_batch == 32


def test_early_stop_is_counted_as_it_was() -> None:
    metrics = block_metrics(block([request(0.01, 0.01, 128)] * 31 + [request(0.01, 0.01, 10)]))
    assert metrics.output_tokens == 3978
    assert metrics.steady_batch == 31
    assert metrics.decode_tok_s.value == pytest.approx(3100)


def test_jitter_at_the_ends_costs_nothing() -> None:
    requests = [request(1.0 + 0.0001 * i, 0.01, 128) for i in range(32)]
    assert block_metrics(block(requests)).decode_tok_s.value == pytest.approx(3200, rel=1e-6)


def test_second_wave_prefill_is_outside_the_steady_rate() -> None:
    """64 asked, 32 run: the batch is 32, and the second wave's second of prefill slows the whole rate only."""
    requests = [request(0.01, 0.01, 101)] * 32 + [request(2.01, 0.01, 101)] * 32
    metrics = block_metrics(block(requests))
    assert metrics.steady_batch == 32
    assert metrics.decode_tok_s.value == pytest.approx(3200)
    assert metrics.decode_tok_s_whole.value == pytest.approx(6400 / 3)


def test_what_a_stalled_client_gets_at_once_was_not_made_at_once() -> None:
    """32 requests, 100 tokens/s each; the client reads nothing from 0.1 s to 1 s, then all that has piled up."""
    chunks = tuple((1 + k, 0.01 * k if k < 10 or k >= 100 else 1.0) for k in range(0, 200, 8))
    sample = RequestSample(0.0, ((1, 0.995), *(c for c in chunks if c[1] >= 1.0)), 10, 0, 193, "usage", "length")
    requests = [sample] * 32
    metrics = block_metrics(block(requests))
    assert metrics.steady_batch == 32
    assert metrics.decode_tok_s.value == pytest.approx(3200, rel=0.02)


def test_a_batch_that_never_settles_has_no_steady_rate() -> None:
    metrics = block_metrics(block([request(0.01, 0.01, 51 + 50 * i) for i in range(12)]))
    assert metrics.decode_tok_s.value is None
    assert "never settled" in (metrics.decode_tok_s.reason or "")
    assert metrics.decode_tok_s_whole.value is not None


def test_warm_up_in_flight_is_excluded_and_counted() -> None:
    """5 s at 1000 tok/s of warm-up that reaches into 25 s at 2000."""
    warm = RequestSample(-5.0, ((1, -5.0), (5500, 0.5)), 10, 0, 5500, "usage", "length")
    measured = RequestSample(0.0, ((1, 0.0005), (50_000, 25.0)), 10, 0, 50_000, "usage", "length")
    metrics = block_metrics(block([warm, measured]))
    assert metrics.end_to_end_tok_s.value == pytest.approx(2000)
    assert (metrics.warmup_in_flight, metrics.completed, metrics.prompt_tokens) == (1, 1, 10)


def test_failed_requests_are_outside_throughput() -> None:
    good = [request(1.0, 0.01, 101)] * 97
    bad = [RequestSample(0.0, ((1, 1.0), (50, 1.5)), 10, 0, 50, "usage", None, "connection reset")] * 3
    metrics = block_metrics(block(good + bad))
    assert (metrics.completed, metrics.failed, metrics.output_tokens) == (97, 3, 97 * 101)
    assert metrics.decode_tok_s.value == pytest.approx(9700)


def test_realized_batch_comes_from_the_counters() -> None:
    asked_64 = block([request(1.0, 0.01, 65)] * 64, counters=counters({"cascade": 128}, 32))
    metrics = block_metrics(asked_64)
    assert (metrics.realized_batch.value, metrics.batch_source) == (32, "counters")
    assert realized_batch({32: 128, 1: 1920}) == 32, "most steps are not most tokens"
    assert realized_batch({}) is None


def test_nothing_finished() -> None:
    metrics = block_metrics(block([request(1.0, 0.01, 5, error="timeout")], wall_s=1.0))
    assert metrics.end_to_end_tok_s.reason == "no request finished"
    assert metrics.cached_tokens is None
    assert measured_requests(block([], wall_s=1.0)) == []


def test_latencies_are_per_request() -> None:
    latencies = request_latencies(block([request(1.0, 0.01, 11), request(2.0, 0.02, 11, sent_s=0.5)]))
    assert latencies.ttft_ms == pytest.approx((1000, 1500))
    assert latencies.tpot_ms == pytest.approx((10, 20))
    assert latencies.end_to_end_ms == pytest.approx((1100, 1700))
