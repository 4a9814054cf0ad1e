"""Churn: requests that arrive by a Poisson process whatever the server does, over several prefixes and none."""

from __future__ import annotations

from dataclasses import dataclass

from prefixbench.case import Settings
from prefixbench.errors import UsageError
from prefixbench.workloads.base import Draft, PromptSpec, Sizes, Tokens


@dataclass(frozen=True)
class ChurnOptions:
    """`unshared` is the probability that a request has no shared prefix; popularity of prefix k falls as 1 / (k + 1).

    `requests` None: four times the requests in flight. Output lengths are uniform in 1 .. 2 x output_tokens - 1.
    """

    rate_per_s: float = 4.0
    prefixes: int = 4
    unshared: float = 0.25
    requests: int | None = None


def churn(sizes: Sizes, options: ChurnOptions, tokens: Tokens) -> Draft:
    """Open loop: `arrival_s` are intended send times, fixed before the run, so queueing counts as latency."""
    count = 4 * sizes.concurrency if options.requests is None else options.requests
    if options.rate_per_s <= 0 or options.prefixes < 1 or not 0 <= options.unshared <= 1 or count < 1:
        raise UsageError(
            "workload churn: rate_per_s must be positive, prefixes and requests at least 1, unshared between 0 and 1"
        )
    rng = tokens.rng
    arrivals_s = rng.exponential(1 / options.rate_per_s, size=count).cumsum()
    weights = [1 / (k + 1) for k in range(options.prefixes)]
    chosen = rng.choice(options.prefixes, size=count, p=[weight / sum(weights) for weight in weights])
    is_unshared = rng.random(count) < options.unshared
    outputs = rng.integers(1, 2 * sizes.output_tokens, size=count)
    texts = tokens.texts([sizes.prefix_tokens] * (options.prefixes + int(is_unshared.sum())))
    prefixes, own = texts[: options.prefixes], iter(texts[options.prefixes :])
    requests = tuple(
        PromptSpec(
            (next(own) if alone else prefixes[prefix]) + suffix,
            int(output),
            arrival_s=float(arrival_s),
            prefix_id=None if alone or not sizes.prefix_tokens else int(prefix),
        )
        for suffix, prefix, alone, output, arrival_s in zip(
            tokens.texts([sizes.suffix_tokens] * count), chosen, is_unshared, outputs, arrivals_s, strict=True
        )
    )
    note: Settings = {"open_loop": True, "rate_per_s": options.rate_per_s, "last_arrival_s": float(arrivals_s[-1])}
    return Draft(requests, tuple(prefixes) if sizes.prefix_tokens else (), note)
