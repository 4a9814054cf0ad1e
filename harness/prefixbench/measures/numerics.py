"""Log-probabilities of forced tokens on a running server, and the proof that the path asked for served every step."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixbench.case import NumericsCase
from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.forcing import Generates, Tokens, draw, score
from prefixbench.measures.serving import subtract
from prefixbench.record import NumericsMeasurement, StepCounters

# What may serve the steps of a path. `auto` may choose stock too, but stock compared with itself says nothing.
SERVED_BY = {
    "stock": {"stock"},
    "paged": {"paged"},
    "cascade": {"cascade"},
    "dense": {"dense"},
    "full": {"cascade", "dense"},
    "auto": {"paged", "cascade", "dense"},
}
_IDLE_WAIT_S = 30.0


class Subject(Generates, Protocol):
    """What a measurement needs of a server with the plugin."""

    def set_path(self, path: str) -> None: ...
    def flush(self) -> bool: ...
    def prime(self, prompt: Sequence[int]) -> None: ...
    def counters(self) -> StepCounters | None: ...


@dataclass(frozen=True)
class Script:
    """What every case of a launch decodes. `forced` [requests][1 + decode tokens]: the first one is the prefill's."""

    prefix: tuple[int, ...]
    prompts: Tokens
    forced: Tokens

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.prompts, self.forced]).encode()).hexdigest()


def write_script(server: Subject, prefix: tuple[int, ...], prompts: Tokens, decode_tokens: int, vocab: int) -> Script:
    """Draws the tokens to force from stock."""
    _prepare(server, "stock", prefix)
    return Script(prefix, prompts, draw(server, prompts, decode_tokens + 1, vocab))


def measure(server: Subject, case: NumericsCase, script: Script, vocab: int) -> NumericsMeasurement:
    """Decodes the script once, `case.concurrency` requests at a time; each batch starts and ends as one."""
    _prepare(server, case.path, script.prefix)
    before = server.counters()
    logprobs: list[tuple[float, ...]] = []
    argmax: list[tuple[int, ...]] = []
    for first in range(0, case.requests, case.concurrency):
        batch = slice(first, first + case.concurrency)
        scores = score(server, script.prompts[batch], script.forced[batch], vocab)
        logprobs += scores.logprobs
        argmax += scores.argmax
    after = server.counters()
    if before is None or after is None:
        raise ServerFailedError("the server reports no step counters; nothing proves which path decoded")
    return NumericsMeasurement(script.sha256, tuple(logprobs), tuple(argmax), subtract(after, before))


def not_proven(case: NumericsCase, counters: StepCounters) -> str | None:
    """Why the counters do not prove that this path decoded every position in the batch asked for; None if they do."""
    foreign = {name: steps for name, steps in counters.steps.items() if steps and name not in SERVED_BY[case.path]}
    if foreign:
        return f"path {case.path} was served by {', '.join(f'{name} on {n} steps' for name, n in foreign.items())}"
    batches = sorted(batch for batch, steps in counters.batch_histogram.items() if steps)
    if batches != [case.concurrency]:
        return (
            f"the batch was {', '.join(map(str, batches)) or 'never decoded'} where {case.concurrency} was asked for; "
            "a prefill must fit into one step: use a shorter suffix_len or a larger engine.chunked_prefill_size"
        )
    wanted = case.decode_tokens * case.requests // case.concurrency
    if sum(counters.steps.values()) < wanted:
        return f"{sum(counters.steps.values())} decode steps were counted, {wanted} were compared"
    return None


def _prepare(server: Subject, path: str, prefix: tuple[int, ...]) -> None:
    """An idle server with this path and an empty cache but for the prefix."""
    server.set_path(path)
    deadline = time.monotonic() + _IDLE_WAIT_S
    while not server.flush():
        if time.monotonic() > deadline:
            raise ServerFailedError(f"the server was not idle after {_IDLE_WAIT_S:.0f} s", "timeout")
        time.sleep(0.1)
    server.prime(prefix)
