"""Workloads: shapes, seeds, arrival times, and the sharing that is really there against a brute-force count."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbench.errors import UsageError
from prefixbench.workloads import NAMES, PromptSpec, Workload, build
from prefixbench.workloads.sharing import measure_sharing

SIZES: dict[str, Any] = {
    "prefix_tokens": 40,
    "suffix_tokens": 6,
    "output_tokens": 8,
    "concurrency": 64,
    "vocab_size": 1000,
    "seed": 7,
}


def make(name: str, settings: dict[str, Any] | None = None, **sizes: Any) -> Workload:
    return build(name, settings or {}, **{**SIZES, **sizes})


def starts_with_a_primer(workload: Workload) -> bool:
    return all(
        any(request.input_ids[: len(primer)] == primer for primer in workload.primers) for request in workload.requests
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_repeats_exactly_and_another_seed_changes_every_prompt(name: str) -> None:
    assert make(name) == make(name)
    first, other = make(name), make(name, seed=8)
    assert not {request.input_ids for request in first.requests} & {request.input_ids for request in other.requests}


@pytest.mark.parametrize("name", NAMES)
def test_ids_stay_inside_the_vocabulary_and_clear_of_special_tokens(name: str) -> None:
    ids = {token for request in make(name).requests for token in request.input_ids}
    assert min(ids) >= 20
    assert max(ids) < 980


def test_shared_prefix_shares_exactly_the_prefix() -> None:
    workload = make("shared-prefix")
    assert starts_with_a_primer(workload)
    assert [len(primer) for primer in workload.primers] == [40]
    assert workload.note["shared_tokens"] == 64 * 40
    assert workload.note["distinct_tokens"] == 40 + 64 * 6
    assert (workload.note["groups"], workload.note["largest_group"]) == (1, 64)
    assert workload.note["shared_fraction"] == pytest.approx(40 / 46)


def test_distinct_has_the_same_lengths_and_shares_nothing() -> None:
    workload = make("distinct")
    assert {len(request.input_ids) for request in workload.requests} == {46}
    assert (workload.note["shared_tokens"], workload.note["groups"], workload.primers) == (0, 0, ())


def test_rollouts_sample_each_prompt_in_a_row() -> None:
    workload = make("rollouts", {"prompts": 16}, suffix_tokens=0)
    assert [request.prefix_id for request in workload.requests] == [i // 4 for i in range(64)]
    assert len({request.input_ids for request in workload.requests}) == 16
    assert workload.note["distinct_tokens"] == 16 * 40
    assert workload.note["shared_fraction"] == 1.0
    assert (workload.note["groups"], workload.note["largest_group"], workload.note["samples"]) == (16, 4, 4)
    assert starts_with_a_primer(workload)


def test_tenants_share_two_levels() -> None:
    workload = make("tenants", {"tenants": 4, "system_share": 0.25})
    assert starts_with_a_primer(workload)
    assert len(workload.primers) == 4
    assert len({primer[:10] for primer in workload.primers}) == 1
    assert len({primer[:11] for primer in workload.primers}) == 4
    assert workload.note["distinct_tokens"] == 10 + 4 * 30 + 64 * 6


def test_churn_arrives_by_itself_at_the_asked_rate() -> None:
    workload = make("churn", {"rate_per_s": 20.0, "requests": 2000})
    arrivals_s = [request.arrival_s for request in workload.requests]
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    assert all(gap > 0 for gap in gaps_s)
    assert np.mean(gaps_s) == pytest.approx(1 / 20, rel=0.1)
    assert np.std(gaps_s) == pytest.approx(1 / 20, rel=0.15)  # exponential: as wide as its mean
    alone = [request for request in workload.requests if request.prefix_id is None]
    assert len(alone) / 2000 == pytest.approx(0.25, abs=0.04)
    assert {request.max_new_tokens for request in workload.requests} == set(range(1, 16))
    assert workload.note["open_loop"] is True


def test_closed_loop_workloads_are_all_due_at_once() -> None:
    for name in set(NAMES) - {"churn"}:
        assert {request.arrival_s for request in make(name).requests} == {0.0}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_measured_sharing_equals_a_brute_force_count(prompts: list[list[int]]) -> None:
    def common(first: list[int], second: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )

    note = measure_sharing([PromptSpec(tuple(prompt), 1) for prompt in prompts])
    shared = sum(
        max((common(prompt, other) for j, other in enumerate(prompts) if j != i), default=0)
        for i, prompt in enumerate(prompts)
    )
    assert note["shared_tokens"] == shared
    assert note["distinct_tokens"] == len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


@pytest.mark.parametrize(
    ("name", "settings", "sizes", "words"),
    [
        ("nope", {}, {}, "allowed: shared-prefix, distinct"),
        ("churn", {"rate": 3.0}, {}, "no setting 'rate'; allowed: rate_per_s"),
        ("churn", {"rate_per_s": "fast"}, {}, "must be of type float"),
        ("churn", {"rate_per_s": 0}, {}, "rate_per_s must be positive"),
        ("tenants", {"tenants": True}, {}, "must be of type int"),
        ("rollouts", {"prompts": 48}, {}, "no multiple of prompts=48"),
        ("shared-prefix", {"requests": 0}, {}, "must be at least 1"),
        ("shared-prefix", {}, {"prefix_tokens": 0, "suffix_tokens": 0}, "at least one token"),
        ("shared-prefix", {}, {"concurrency": 0}, "concurrency=0"),
        ("shared-prefix", {}, {"seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    name: str, settings: dict[str, Any], sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        make(name, settings, **sizes)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
