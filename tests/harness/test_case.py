"""Cases and launches: hashes that ignore order and launch count, interleaving that favours no path."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from prefixbench.case import KernelCase, ServingCase, case_hash
from prefixbench.jobs import sweep
from prefixbench.jobs.sweep import LaunchPlan
from record_factory import CASE


def test_hash_is_stable_and_ignores_key_order() -> None:
    reordered = replace(CASE, engine_settings=dict(reversed(list({"page_size": 1, "b": 2}.items()))))
    assert case_hash(replace(CASE, engine_settings={"page_size": 1, "b": 2})) == case_hash(reordered)
    older = replace(CASE, workload="shared_prefix")
    assert case_hash(older) == "682822dec057", "a changed hash orphans every record made so far"


@pytest.mark.parametrize(
    "changed",
    [{"path": "full"}, {"plugin": False}, {"prefix_tokens": 2049}, {"engine_settings": {"page_size": 16}}],
)
def test_what_is_measured_differently_has_another_hash(changed: dict[str, object]) -> None:
    assert case_hash(replace(CASE, **changed)) != case_hash(CASE)  # type: ignore[arg-type]


def test_kernel_and_serving_cases_never_collide() -> None:
    kernel = KernelCase("dense", 1, 1, 1, 1, 1, 1, 1, "bfloat16", "contiguous", {})
    assert case_hash(kernel) != case_hash(CASE)


def _case(path: str, prefix: int = 2048, plugin: bool = True) -> ServingCase:
    return replace(CASE, path=path, prefix_tokens=prefix, plugin=plugin)


def test_plan_needs_only_what_is_missing_and_alternates_the_baseline() -> None:
    wanted = (_case("stock"), _case("full"), _case("stock", plugin=False))
    plans = sweep.plan(wanted, 3, {})
    assert [(p.plugin, p.index) for p in plans] == [(True, 0), (False, 0), (False, 1), (True, 1), (True, 2), (False, 2)]
    done = {case_hash(_case("full")): 3, case_hash(_case("stock", plugin=False)): 2, case_hash(_case("stock")): 1}
    left = sweep.plan(wanted, 3, done)
    assert [(p.index, [(c.path, c.plugin) for c in p.cases]) for p in left] == [
        (1, [("stock", True)]),
        (2, [("stock", True)]),
        (2, [("stock", False)]),
    ]


def test_side_by_side_is_one_launch_with_both_servers() -> None:
    wanted = (_case("stock"), _case("full"), _case("stock", plugin=False))
    plans = sweep.plan(wanted, 2, {case_hash(wanted[0]): 1}, side_by_side=True)
    assert [(p.index, len(p.cases), p.side_by_side) for p in plans] == [(0, 2, True), (1, 3, True)]
    (cell,) = sweep.cells(plans[1], 1)
    assert cell == wanted, "stock without the plugin takes turns with the paths"


def test_cells_hold_all_paths_of_one_size_in_an_order_that_changes_by_launch() -> None:
    cases = tuple(_case(path, prefix) for prefix in (1, 2, 3, 4) for path in ("stock", "cascade"))
    orders = {tuple(c[0].prefix_tokens for c in sweep.cells(LaunchPlan(cases, i), 1)) for i in range(5)}
    assert len(orders) > 1
    for cell in sweep.cells(LaunchPlan(cases, 0), 1):
        assert [case.path for case in cell] == ["stock", "cascade"]
        assert len({case.prefix_tokens for case in cell}) == 1


@pytest.mark.parametrize("paths", [2, 3, 4])
def test_over_launches_every_path_takes_every_place_and_follows_every_other(paths: int) -> None:
    cell = tuple(_case(path) for path in ("stock", "cascade", "full", "auto")[:paths])
    rounds = [turn for launch in range(2 * paths) for turn in sweep.turns(cell, launch, 1)]
    for place in range(paths):
        assert set(Counter(turn[place].path for turn in rounds).values()) == {2}
    followers = Counter((a.path, b.path) for turn in rounds for a, b in pairwise(turn))
    assert all(count == followers[b, a] for (a, b), count in followers.items()), "a before b as often as b before a"
