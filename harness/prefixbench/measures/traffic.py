"""Hours of mixed requests as a stream: prefixes that come into fashion and go, unique suffixes, random lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
_VOCABULARY = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """Lengths are log-normal around a median; `spread` is the standard deviation of their logarithm."""

    arrivals_per_s: float = 8.0
    prefixes: int = 48
    """How many are in use at a time; the popularity of the r-th falls as 1/r."""
    prefix_life_s: float = 900.0
    unshared: float = 0.2
    """Share of the requests whose prefix nobody else has."""
    prefix_tokens: int = 2048
    suffix_tokens: int = 128
    output_tokens: int = 200
    spread: float = 0.8
    longest_prefix_tokens: int = 16384


class Arrival(NamedTuple):
    at_s: float
    prompt: Tokens
    output_tokens: int


def arrivals(traffic: Traffic, seed: int) -> Iterator[Arrival]:
    """Without end, in order of time; the same seed gives the same stream."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, traffic.prefixes + 1)
    weights /= weights.sum()
    prefixes = [_tokens(random, _prefix_length(traffic, random)) for _ in range(traffic.prefixes)]
    renewal_s = traffic.prefix_life_s / traffic.prefixes
    at_s, renewed_s = 0.0, 0.0
    for index in count():
        at_s += random.exponential(1 / traffic.arrivals_per_s)
        while renewed_s + renewal_s < at_s:
            renewed_s += renewal_s
            prefixes[random.integers(traffic.prefixes)] = _tokens(random, _prefix_length(traffic, random))
        if random.random() < traffic.unshared:
            prefix = _tokens(random, _prefix_length(traffic, random))
        else:
            prefix = prefixes[random.choice(traffic.prefixes, p=weights)]
        suffix = _tokens(random, _length(random, traffic.suffix_tokens, traffic.spread))
        # No two requests go on alike: where they part is the end of what they share.
        suffix[0] = _VOCABULARY + index
        yield Arrival(at_s, np.concatenate((prefix, suffix)), _length(random, traffic.output_tokens, traffic.spread))


def _prefix_length(traffic: Traffic, random: np.random.Generator) -> int:
    return min(_length(random, traffic.prefix_tokens, traffic.spread), traffic.longest_prefix_tokens)


def _length(random: np.random.Generator, median: int, spread: float) -> int:
    return max(1, round(random.lognormal(math.log(median), spread)))


def _tokens(random: np.random.Generator, length: int) -> Tokens:
    return random.integers(_VOCABULARY, size=length)
