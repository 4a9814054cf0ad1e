"""The verdict on a path: deviations with known answers, errors of both kinds, records that do not belong together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.builders import counters, wrap
from prefixbench.analysis.numerics import FLOOR, agreement, verdicts
from prefixbench.case import NumericsCase
from prefixbench.record import Failure, NumericsMeasurement, Record

REQUESTS, TOKENS = 32, 64
CASE = NumericsCase(
    model="tiny",
    role="reference",
    path="stock",
    concurrency=REQUESTS,
    requests=REQUESTS,
    prefix_tokens=512,
    suffix_tokens=8,
    decode_tokens=TOKENS,
    tensor_parallel=1,
    stock_backend="torch_native",
    fault="none",
    engine_settings={},
    workload_settings={"seed": 1},
    model_settings={},
)


def measured(logprobs: np.ndarray, argmax: np.ndarray | None = None, tokens: str = "same") -> NumericsMeasurement:
    said = np.zeros(logprobs.shape, int) if argmax is None else argmax
    return NumericsMeasurement(
        tokens,
        tuple(map(tuple, logprobs.tolist())),
        tuple(map(tuple, said.tolist())),
        counters({"stock": TOKENS}, REQUESTS),
    )


def drawn(seed: int, size: float, reference: np.ndarray) -> np.ndarray:
    """`reference` with heavy-tailed deviations, some requests more affected than others, as rounding affects them."""
    generator = np.random.default_rng(seed)
    spread = generator.gamma(2.0, 0.5, (REQUESTS, 1))
    return reference + size * spread * generator.standard_t(5, reference.shape)


REFERENCE = -np.random.default_rng(0).gamma(8.0, 1.0, (REQUESTS, TOKENS))


def judged(path: np.ndarray, noise: np.ndarray) -> object:
    return agreement(measured(REFERENCE), measured(noise), measured(path))


def test_deviations_are_those_of_the_same_positions() -> None:
    path = REFERENCE.copy()
    path[3, 5] -= 0.5
    path[4] += 0.01
    other = np.zeros(path.shape, int)
    other[0, :32] = 9
    found = agreement(measured(REFERENCE), measured(REFERENCE + 0.1), measured(path, other))
    assert found.path.positions == REQUESTS * TOKENS
    assert found.path.largest == pytest.approx(0.5)
    assert found.path.mean == pytest.approx((0.5 + 64 * 0.01) / 2048)
    assert found.path.median == 0.0
    # p99.9 of 2048 positions would be the value of two of them.
    assert found.path.quantiles == (pytest.approx(0.01), None)
    assert found.path.other_argmax == 32 / 2048
    assert (found.noise.largest, found.noise.mean) == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.ratio == pytest.approx(5.0)


def test_a_path_like_stock_s_noise_is_inside_and_one_that_is_further_is_not() -> None:
    alike = [judged(drawn(2 * i, 0.02, REFERENCE), drawn(2 * i + 1, 0.02, REFERENCE)) for i in range(20)]
    assert sum(found.inside for found in alike) >= 18
    closer = judged(drawn(100, 0.005, REFERENCE), drawn(101, 0.02, REFERENCE))
    assert closer.inside
    assert closer.ratio < 1.0
    further = [judged(drawn(2 * i, 0.05, REFERENCE), drawn(2 * i + 1, 0.02, REFERENCE)) for i in range(10)]
    assert sum(found.inside for found in further) <= 2


def test_one_broken_request_among_many_is_found() -> None:
    path = drawn(1, 0.02, REFERENCE)
    path[7] += 3.0
    found = judged(path, drawn(2, 0.02, REFERENCE))
    assert found.p_value > 0.05, "exchanging requests alone does not see it"
    assert not found.inside


def test_rounding_of_the_log_probabilities_themselves_is_no_difference() -> None:
    assert judged(REFERENCE + FLOOR / 2, REFERENCE).inside
    assert not judged(REFERENCE + FLOOR * 20, REFERENCE).inside


def test_other_tokens_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="same tokens"):
        agreement(measured(REFERENCE), measured(REFERENCE), measured(REFERENCE, tokens="others"))


def launch(index: int, path: np.ndarray, fault: str = "none") -> list[Record]:
    case = replace(CASE, fault=fault)
    return [
        wrap(case, measured(REFERENCE), index),
        wrap(replace(case, role="noise", concurrency=8), measured(drawn(3, 0.02, REFERENCE)), index),
        wrap(replace(case, role="path", path="cascade"), measured(path), index),
    ]


def test_paths_are_compared_with_the_stock_of_their_own_launch() -> None:
    good, wiped = drawn(4, 0.02, REFERENCE), REFERENCE + 2.0
    found = verdicts([*launch(0, good), *launch(1, wiped), *launch(2, wiped, "zero-prefix"), *launch(3, good, "x")])
    assert [(v.said, v.as_it_must_be, v.noise_concurrency) for v in found] == [
        ("inside", True, 8),
        ("OUTSIDE", False, 8),
        ("outside, as it must be", True, 8),
        ("inside, though it must not be", False, 8),
    ]


def test_what_was_not_measured_or_not_proven_has_no_verdict() -> None:
    reference, noise, path = launch(0, REFERENCE)
    foreign = replace(path, status="failed", failure=Failure("path", "path cascade was served by stock on 3 steps"))
    dead = replace(reference, status="failed", measurement=None, failure=Failure("server", "it died"))
    outside = replace(path, status="failed", failure=Failure("numerics", "further"))
    for records, why in (
        ([reference, noise, foreign], "path cascade was served by stock on 3 steps"),
        ([dead, noise, path], "it died"),
        ([noise, path], "the record of the reference is not in this selection"),
    ):
        (found,) = verdicts(records)
        assert (found.agreement, found.why_not, found.said) == (None, why, "not measured")
        assert not found.as_it_must_be
    (again,) = verdicts([reference, noise, outside])
    assert again.agreement is not None, "a path that was found outside is judged from its samples, not from its status"
