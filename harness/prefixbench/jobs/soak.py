"""A soak: traffic of every kind on a server with the plugin, every answer compared with those of a stock server."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prefixbench.config.run import PATHS
from prefixbench.config.soak import NO_FAULT, SoakConfig, server_config
from prefixbench.engines import sglang
from prefixbench.engines.base import ServerFailedError
from prefixbench.machine import lock
from prefixbench.measures.soak import Answer, Observed, Prompt, ask_all, drive, prompts
from prefixbench.record import PlacementTrace, StepCounters

# SGLang's own disturbance, and its own checks: they end the server when a slot is lost or has two owners.
STRICT = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "23",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
# Rounding of fp32 log-probabilities of size ~10, when stock happens to repeat bit for bit.
_FLOOR = 1e-5
# Stock's noise is the largest of fewer differences than the soak's.
_MARGIN = 3.0
# Of the share of tokens that stock can compare with itself; and of the answers, which need a log-probability per token.
_LEAST_COMPARABLE = 0.8
_BAD_LINE = re.compile(r"Traceback|Exception|\bERROR\b|[Ll]eak")


class Server(Protocol):
    """As much of a server with the plugin as a soak needs."""

    url: str

    def set_path(self, path: str) -> None: ...
    def counters(self) -> StepCounters | None: ...
    def placement(self) -> PlacementTrace | None: ...


@dataclass(frozen=True)
class Agreement:
    """Of answers with the reference, token by token up to the first other choice, which is still compared."""

    largest: float
    compared: int
    total: int
    unscored: int
    """Answers without a log-probability for every token: SGLang loses one at times when it retracts."""

    @property
    def comparable(self) -> float:
        return self.compared / self.total if self.total else 0.0


@dataclass(frozen=True)
class Reference:
    answers: tuple[Answer, ...]
    noise: Agreement
    """Stock against itself, in other batches."""

    @property
    def bound(self) -> float:
        return _MARGIN * max(self.noise.largest, _FLOOR)


@dataclass(frozen=True)
class Summary:
    seconds: float
    sent: Mapping[str, int]
    answers: int
    aborted: int
    retractions: int
    flushes: int
    steps: Mapping[str, int]
    noise: Agreement
    agreement: Agreement
    bound: float
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        sent = ", ".join(f"{count} {manner}" for manner, count in sorted(self.sent.items()))
        steps = ", ".join(f"{count} {path}" for path, count in sorted(self.steps.items()) if count)
        verdict = f"{len(self.faults)} FAULTS" if self.faults else "no fault"
        return (
            f"soak of {self.seconds:.0f} s: {verdict}; {self.answers} answers checked ({sent}; {self.retractions} "
            f"retractions, {self.flushes} flushes), largest difference {self.agreement.largest:.2g} "
            f"(bound {self.bound:.2g}); steps: {steps}"
        )


def run(config: SoakConfig, folder: Path, say: Callable[[str], None]) -> Summary:
    """The whole soak: stock answers every prompt twice, then the server with the plugin is driven."""
    engine = sglang.create(server_config(config))
    engine.check()
    asked = prompts(
        config.prompts,
        prefix_tokens=config.prefix_len,
        output_tokens=config.output_len,
        vocabulary=config.model.vocab,
        seed=config.seed,
    )
    with lock.hold(engine.resources):
        say(f"stock answers {len(asked)} prompts, together and {config.noise_in_flight} at a time")
        with _stopped_after(engine.start(False, config.seed, folder / "stock.log", strict=STRICT)) as server:
            expected = reference(server.url, asked, config.in_flight, config.noise_in_flight)
        log = folder / "soak.log"
        say(f"{config.minutes:g} minutes of traffic; server log: {log}")
        fault = None if config.fault == NO_FAULT else config.fault
        with _stopped_after(engine.start(True, config.seed, log, fault, STRICT)) as server:
            return attack(
                server,
                asked,
                expected,
                log,
                seconds=60 * config.minutes,
                gap_s=config.gap_s,
                in_flight=config.in_flight,
                seed=config.seed,
            )


def reference(url: str, asked: Sequence[Prompt], in_flight: int, noise_in_flight: int) -> Reference:
    """Stock's answers, and how far it is from itself when the batches are of another size."""
    answers = ask_all(url, asked, in_flight)
    again = ask_all(url, asked, noise_in_flight)
    return Reference(tuple(answers), agreement(answers, again))


def attack(
    server: Server,
    asked: Sequence[Prompt],
    expected: Reference,
    log: Path,
    *,
    seconds: float,
    gap_s: float,
    in_flight: int,
    seed: int,
) -> Summary:
    """Drives the server, looks for leaks after every wave, and judges everything that was seen."""
    began_s = time.monotonic()
    faults: list[str] = []
    paths = random.Random(seed)

    def between_waves() -> None:
        placement = server.placement()
        free = sum(run.length for run in placement.pool_after if run.kind == "free") if placement else 0
        if placement is None or free != placement.pool_slots:
            faults.append(f"{placement and placement.pool_slots - free} slots are not free after a flush")
        server.set_path(paths.choice([path for path in PATHS if path != "stock"]))

    observed, steps = Observed(), {}
    try:
        server.set_path("full")
        observed = drive(
            server.url,
            asked,
            seconds=seconds,
            gap_s=gap_s,
            in_flight=in_flight,
            seed=seed,
            between_waves=between_waves,
        )
        counters = server.counters()
        steps = counters.steps if counters else {}
    except ServerFailedError as error:
        faults.append(str(error))
    found = agreement(expected.answers, observed.answers)
    retractions = sum(answer.retractions for answer in observed.answers)
    faults += [*observed.errors[:3], *_bad_lines(log), *_disagreements(expected, found, len(observed.answers))]
    never = {"answer": observed.answers, "abort": observed.aborted, "retraction": retractions}
    never |= {"flush": observed.flushes, "step that shares a prefix": steps.get("cascade", 0) + steps.get("dense", 0)}
    faults += [f"no {name} in the whole soak" for name, count in never.items() if not count]
    return Summary(
        seconds=time.monotonic() - began_s,
        sent=dict(observed.sent),
        answers=len(observed.answers),
        aborted=observed.aborted,
        retractions=retractions,
        flushes=observed.flushes,
        steps=dict(steps),
        noise=expected.noise,
        agreement=found,
        bound=expected.bound,
        faults=tuple(faults),
    )


def agreement(expected: Sequence[Answer], answers: Sequence[Answer]) -> Agreement:
    """`expected[i]` answers prompt i. Both are greedy: at the first other choice the context is still the same, and
    each chose its own maximum, so even there the log-probabilities must be close."""
    largest, compared, total, unscored = 0.0, 0, 0, 0
    for answer in answers:
        other = expected[answer.prompt]
        if len(answer.tokens) != len(other.tokens):
            unscored += 1
            continue
        total += len(answer.tokens)
        for step, (mine, theirs) in enumerate(zip(answer.tokens, other.tokens, strict=True)):
            largest = max(largest, abs(answer.logprobs[step] - other.logprobs[step]))
            compared += 1
            if mine != theirs:
                break
    return Agreement(largest, compared, total, unscored)


def _disagreements(expected: Reference, found: Agreement, answers: int) -> list[str]:
    faults = []
    if found.largest > expected.bound:
        faults.append(f"a log-probability is {found.largest:.3g} from stock's, allowed are {expected.bound:.3g}")
    if found.comparable < _LEAST_COMPARABLE * expected.noise.comparable:
        share = f"{found.comparable:.0%} of the tokens, stock with itself on {expected.noise.comparable:.0%}"
        faults.append(f"answers agree with stock's on the context of only {share}")
    if found.unscored > (1 - _LEAST_COMPARABLE) * answers:
        faults.append(f"{found.unscored} of {answers} answers have no log-probability for some token")
    return faults


def _bad_lines(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [f"server log: {line.strip()[:200]}" for line in lines if _BAD_LINE.search(line)][:3]


@contextmanager
def _stopped_after(server: sglang.SglangServer) -> Iterator[sglang.SglangServer]:
    try:
        yield server
    finally:
        server.stop()
