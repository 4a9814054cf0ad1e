"""One timed block on a running server. Priming and warm-up never reach a record; prefill and decode stay apart,
because every chunk's arrival is kept: the first token belongs to prefill, the rest to decode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import mean
from typing import TypeVar

from prefixbench.engines.base import Server
from prefixbench.machine.clocks import NOT_WATCHED, clock_flags
from prefixbench.measures.base import Task
from prefixbench.record import Block, RequestSample, StepCounters, Telemetry
from prefixbench.workloads import PromptSpec

_IDLE_WAIT_S = 10.0
_OTHER_LOAD_CPUS = 0.25
_PROMPT_TOLERANCE = 0.005  # of the prompt: a re-tokenised prompt differs by more

K = TypeVar("K", int, str)


def warm_up(server: Server, task: Task, output_tokens: int) -> None:
    """The block as it will be measured but for `output_tokens` at most, thrown away."""
    _prepare(server, task)
    requests = tuple(replace(r, max_new_tokens=min(r.max_new_tokens, output_tokens)) for r in task.workload.requests)
    server.send(requests, task.how)


def measure_block(server: Server, task: Task, position: int, *, watched: bool = True) -> Block:
    """Sends the block once, from a cache that was emptied and primed; `flags` say what was not as it should be.

    Without `watched` nothing samples meanwhile: no thread, no question to any device.
    """
    flags = [] if _prepare(server, task) else ["warmup-overlap"]
    before = server.counters()
    sampler = task.watch() if watched else None
    with sampler or nullcontext():
        started_at_unix_s, start_s = time.time(), time.perf_counter()
        samples = server.send(task.workload.requests, task.how)
        wall_s = time.perf_counter() - start_s
    after = server.counters()
    counters = None if before is None or after is None else subtract(after, before)
    flags += block_flags(task, samples, counters)
    telemetry = sampler.telemetry() if sampler else ()
    flags += [] if watched else [NOT_WATCHED]
    flags += [*clock_flags(telemetry), *load_flags(telemetry)]
    return Block(
        position=position,
        started_at_unix_s=started_at_unix_s,
        wall_s=wall_s,
        requests=samples,
        counters=counters,
        cache_state=_cache_state(task, samples),
        telemetry=telemetry,
        flags=tuple(flags),
    )


def block_flags(task: Task, samples: Sequence[RequestSample], counters: StepCounters | None) -> list[str]:
    """Plain-word warnings; analysis decides by rule what a flagged block is good for."""
    asked = task.workload.requests
    answered = [(request, sample) for request, sample in zip(asked, samples, strict=True) if sample.error is None]
    flags = []
    if any(not _is_warm(task, request, sample) for request, sample in answered):
        flags.append("cold-cache")
    if any(sample.output_tokens < request.max_new_tokens for request, sample in answered):
        flags.append("early-stop")
    if any(sample.output_tokens > request.max_new_tokens for request, sample in answered):
        flags.append("more-tokens-than-asked")
    if any(
        abs(sample.prompt_tokens - len(request.input_ids)) > _PROMPT_TOLERANCE * len(request.input_ids)
        for request, sample in answered
    ):
        flags.append("prompt-length-differs")
    realized = realized_batch(samples, counters)
    if task.how.in_flight is not None and realized is not None and realized < task.case.concurrency:
        flags.append("batch-below-concurrency")
    ceiling = int(task.case.engine_settings.get("cuda_graph_max_bs") or 0)
    if ceiling and realized is not None and realized > ceiling:
        flags.append("above-graph-ceiling")
    if len(answered) < len(samples):
        flags.append("failed-requests")
    return flags


def load_flags(telemetry: Sequence[Telemetry]) -> list[str]:
    """Says when other processes kept CPUs busy meanwhile: on a CPU that is the first reason for a bad figure."""
    flags = []
    for watched in telemetry:
        seen = [sample.load_other for sample in watched.samples if sample.load_other is not None]
        if seen and mean(seen) > _OTHER_LOAD_CPUS:
            flags.append(f"other-load: {mean(seen):.1f} CPUs were busy with other work")
    return flags


def realized_batch(samples: Sequence[RequestSample], counters: StepCounters | None) -> int | None:
    """The batch of most decode steps as the plugin counted it; without the plugin the most requests that were between
    first and last token at once. None when nothing was decoded."""
    if counters is not None:
        histogram = counters.batch_histogram
        return max(histogram, key=lambda batch: (histogram[batch], batch)) if histogram else None
    edges = []
    for sample in samples:
        if sample.error is None and len(sample.chunks) > 1:
            edges += [(sample.chunks[0][1], 1), (sample.chunks[-1][1], -1)]
    running = most = 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return most or None


def subtract(after: StepCounters, before: StepCounters) -> StepCounters:
    """What was counted between two readings."""
    return StepCounters(
        steps=_subtract_counts(after.steps, before.steps),
        decode_tokens=after.decode_tokens - before.decode_tokens,
        group_steps=after.group_steps - before.group_steps,
        prefix_tokens_read_once=after.prefix_tokens_read_once - before.prefix_tokens_read_once,
        prefix_tokens_read_by_stock=after.prefix_tokens_read_by_stock - before.prefix_tokens_read_by_stock,
        bytes_saved=after.bytes_saved - before.bytes_saved,
        batch_histogram=_subtract_counts(after.batch_histogram, before.batch_histogram),
        decode_s=_subtract_time(after.decode_s, before.decode_s),
        attention_s=_subtract_time(after.attention_s, before.attention_s),
        prefix_s=_subtract_time(after.prefix_s, before.prefix_s),
        plan_s=_subtract_time(after.plan_s, before.plan_s),
        reasons=None if after.reasons is None else _subtract_counts(after.reasons, before.reasons or {}),
    )


def expected_cached_tokens(request: PromptSpec, primers: Sequence[tuple[int, ...]], page_size: int) -> int:
    """How much of this prompt priming put into the cache: whole pages, and never the last prompt token."""
    longest = max((len(p) for p in primers if request.input_ids[: len(p)] == p), default=0)
    return min(longest, len(request.input_ids) - 1) // page_size * page_size


def _prepare(server: Server, task: Task) -> bool:
    """Empties and primes the cache; False when earlier requests were still running and would not end."""
    if task.case.plugin:
        server.set_path(task.case.path)
    deadline = time.monotonic() + _IDLE_WAIT_S
    while not (is_empty := server.flush()) and time.monotonic() < deadline:
        time.sleep(0.2)
    server.snapshot_pool()
    for primer in task.workload.primers:
        server.prime(primer)
    return is_empty


def _is_warm(task: Task, request: PromptSpec, sample: RequestSample) -> bool:
    expected = expected_cached_tokens(request, task.workload.primers, task.page_size)
    return expected == 0 or (sample.cached_tokens is not None and sample.cached_tokens >= expected)


def _cache_state(task: Task, samples: Sequence[RequestSample]) -> str:
    prompt = sum(sample.prompt_tokens for sample in samples)
    cached = sum(sample.cached_tokens or 0 for sample in samples)
    primers = task.workload.primers
    hit_rate = f"{cached / prompt:.4f}" if prompt else "unknown"
    return f"flushed, primed {len(primers)} prefixes of {sum(map(len, primers))} tokens, hit rate {hit_rate}"


def _subtract_counts(after: Mapping[K, int], before: Mapping[K, int]) -> dict[K, int]:
    counted = Counter(dict(after))
    counted.subtract(before)
    return {key: count for key, count in counted.items() if count}


def _subtract_time(after: float | None, before: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)
