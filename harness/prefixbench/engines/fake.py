"""A deterministic engine without a server, for tests of the harness. Its times follow a formula and mean nothing.

`engine.extra_args=['latency_s=0.05']` makes every block take that long in real time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from prefixbench.config.run import RunConfig
from prefixbench.engines.base import SendPlan
from prefixbench.errors import UsageError
from prefixbench.record import PlacementTrace, PoolRun, RadixEvent, RequestSample, StepCounters
from prefixbench.workloads import PromptSpec

K = TypeVar("K", int, str)

_STEP_S = 1e-3
_TOKEN_READ_S = {"stock": 1e-7, "paged": 1e-7, "cascade": 1e-8, "dense": 5e-9, "full": 5e-9, "auto": 5e-9}
_RAN = {"stock": "stock", "paged": "paged", "cascade": "cascade", "dense": "dense", "full": "dense", "auto": "dense"}
_BYTES_PER_TOKEN = 1024
_PREFILL_S = 1e-2
_POOL_SLOTS = 4096


def create(config: RunConfig) -> FakeEngine:
    return FakeEngine(config)


class FakeEngine:
    device_indices = None
    resources: tuple[str, ...] = ()
    labels = ("fake-engine",)

    def __init__(self, config: RunConfig) -> None:
        self._latency_s = _latency_s(config.engine.extra_args)

    def check(self) -> None:
        """Nothing is needed."""

    def plugin_source(self) -> str:
        return "fake"

    def start(self, plugin: bool, seed: int, log: Path) -> FakeServer:
        return self.begin(plugin, seed, log)

    def begin(self, plugin: bool, seed: int, log: Path) -> FakeServer:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"fake server, plugin {plugin}, seed {seed}\n")
        return FakeServer(plugin, seed, log, self._latency_s)


class FakeServer:
    startup_s = 0.5
    command = ("fake",)
    url = "fake:"
    model_folder = Path()

    def __init__(self, plugin: bool, seed: int, log: Path, latency_s: float) -> None:
        self._plugin = plugin
        self._random = random.Random(seed)
        self._log = log
        self._latency_s = latency_s
        self._path = "stock"
        self._primed: list[tuple[int, ...]] = []
        self._totals = StepCounters({}, 0, 0, 0, 0, 0, {}, decode_s=0.0, reasons={})

    def ready(self) -> None:
        """It always is."""

    def set_path(self, path: str) -> None:
        self._path = path

    def flush(self) -> bool:
        self._primed.clear()
        return True

    def snapshot_pool(self) -> None:
        """The fake pool is always empty before a block."""

    def prime(self, prompt: Sequence[int]) -> None:
        self._primed.append(tuple(prompt))

    def send(self, requests: Sequence[PromptSpec], how: SendPlan) -> tuple[RequestSample, ...]:
        time.sleep(self._latency_s)
        batch = min(len(requests), how.in_flight or len(requests))
        step_s = self._step_s(requests, batch) * self._random.uniform(0.99, 1.01)
        samples = tuple(self._sample(request, how, step_s) for request in requests)
        self._count(requests, batch, step_s)
        return samples

    def counters(self) -> StepCounters | None:
        return self._totals if self._plugin else None

    def placement(self) -> PlacementTrace | None:
        if not self._plugin:
            return None
        tokens = sum(map(len, self._primed))
        created = RadixEvent(1, "create", 1, tokens, "contiguous", "long enough")
        after = (PoolRun(0, min(tokens, _POOL_SLOTS), "prefix-run", 1, 1),)
        return PlacementTrace(1, 0, {"long enough": 1}, (created,), 0, _POOL_SLOTS, (PoolRun(0, 4096, "free"),), after)

    def log_tail(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        """Nothing runs."""

    def _step_s(self, requests: Sequence[PromptSpec], batch: int) -> float:
        shared = max((len(prompt) for prompt in self._primed), default=0)
        longest = max(len(request.input_ids) for request in requests)
        read = batch * longest if self._path in ("stock", "paged") else shared + batch * (longest - shared)
        return _STEP_S + read * _TOKEN_READ_S[self._path]

    def _sample(self, request: PromptSpec, how: SendPlan, step_s: float) -> RequestSample:
        tokens = request.max_new_tokens
        sent = [*range(1, tokens, how.stream_interval), tokens]
        cached = max((len(p) for p in self._primed if request.input_ids[: len(p)] == p), default=0)
        return RequestSample(
            sent_s=request.arrival_s,
            chunks=tuple((n, request.arrival_s + _PREFILL_S + (n - 1) * step_s) for n in sorted(set(sent))),
            prompt_tokens=len(request.input_ids),
            cached_tokens=min(cached, len(request.input_ids) - 1),
            output_tokens=tokens,
            token_source="usage",  # noqa: S106 - counts tokens, not a password
            finish_reason="length",
        )

    def _count(self, requests: Sequence[PromptSpec], batch: int, step_s: float) -> None:
        steps = max(request.max_new_tokens for request in requests) - 1
        ran = _RAN[self._path]
        shared = max((len(prompt) for prompt in self._primed), default=0) * steps
        is_shared = ran in ("cascade", "dense")
        old = self._totals
        self._totals = StepCounters(
            steps=_added(old.steps, ran, steps),
            decode_tokens=old.decode_tokens + batch * steps,
            group_steps=old.group_steps + steps * is_shared,
            prefix_tokens_read_once=old.prefix_tokens_read_once + shared * is_shared,
            prefix_tokens_read_by_stock=old.prefix_tokens_read_by_stock + shared * batch * (not is_shared),
            bytes_saved=old.bytes_saved + shared * (batch - 1) * _BYTES_PER_TOKEN * is_shared,
            batch_histogram=_added(old.batch_histogram, batch, steps),
            decode_s=(old.decode_s or 0.0) + steps * step_s,
            reasons=_added(old.reasons or {}, f"{self._path} was asked for", steps),
        )


def _added(counts: dict[K, int], key: K, more: int) -> dict[K, int]:
    return {**counts, key: counts.get(key, 0) + more} if more else counts


def _latency_s(arguments: Sequence[str]) -> float:
    latency_s = 0.0
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name != "latency_s":
            raise UsageError(f"engine.extra_args: the fake engine has no {argument!r}; allowed: latency_s=SECONDS")
        latency_s = float(value)
    return latency_s
