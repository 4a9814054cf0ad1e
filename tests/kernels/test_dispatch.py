"""The dispatcher's rule, its reasons, and what it must never do."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixonce import Choice, DecodeStep, Limits, Mode, Path, PrefixGroup, Segment, SlotPiece, choose
from prefixonce.dispatch import Dispatcher
from prefixonce.errors import LayoutError, PrefixOnceError


@functools.cache
def pieces_of(tokens: int, contiguous: bool) -> tuple[Segment | SlotPiece]:
    """The same object every time, as those of a radix node are."""
    return (Segment(1, tokens) if contiguous else SlotPiece(slots=None, length_tokens=tokens),)  # type: ignore[arg-type]


def group(rows: int, tokens: int = 4096, *, contiguous: bool = True, first: int = 0) -> PrefixGroup:
    return PrefixGroup(tuple(range(first, first + rows)), tokens, pieces_of(tokens, contiguous))


def step(*groups: PrefixGroup, gqa: int = 4) -> DecodeStep:
    rows = sum(len(g.rows) for g in groups)
    return DecodeStep((5000,) * max(rows, 1), 8 * gqa, 8, 128, groups)


@pytest.mark.parametrize(("rows", "path"), [(256, Path.DENSE), (255, Path.CASCADE), (2, Path.CASCADE)])
def test_the_seeds_threshold(rows: int, path: Path) -> None:
    choice = choose(step(group(rows)), Mode.FULL, Limits())
    assert choice.path is path
    assert f"M_eff {rows * 4}" in choice.reason


@pytest.mark.parametrize(("q_heads", "kv_heads", "batch", "m_eff"), [
    (40, 8, 3, 15), (28, 4, 8, 56), (14, 2, 17, 119), (64, 4, 8, 128), (9, 3, 8, 24), (12, 2, 1, 6),
    (32, 32, 8, 8), (8, 1, 8, 64),
])  # fmt: skip
def test_m_eff_is_batch_times_gqa_group(q_heads: int, kv_heads: int, batch: int, m_eff: int) -> None:
    shared = group(batch)
    assert DecodeStep((5000,) * batch, q_heads, kv_heads, 128, (shared,)).m_eff(shared) == m_eff


def test_dense_needs_contiguity() -> None:
    choice = choose(step(group(512, contiguous=False)), Mode.FULL, Limits())
    assert choice.path is Path.CASCADE
    assert "none of the prefix is contiguous" in choice.reason


def test_each_group_has_its_own_verdict() -> None:
    choice = choose(step(group(300), group(4, first=300), group(1, first=304)), Mode.FULL, Limits())
    assert choice.paths == (Path.DENSE, Path.CASCADE, Path.STOCK)
    assert choice.path is Path.DENSE


def test_no_prefix_or_one_request_is_stock_and_says_why() -> None:
    assert choose(step(), Mode.FULL, Limits()) == Choice(Path.STOCK, (), (), "no two running requests share a prefix")
    alone = choose(step(group(1), gqa=1), Mode.FULL, Limits())
    assert alone.path is Path.STOCK
    assert "shares with nobody" in alone.reason


@pytest.mark.parametrize(("mode", "path"), [
    (Mode.STOCK, Path.STOCK), (Mode.PAGED, Path.PAGED), (Mode.CASCADE, Path.CASCADE), (Mode.DENSE, Path.DENSE),
])  # fmt: skip
def test_a_forced_path_is_taken(mode: Mode, path: Path) -> None:
    assert choose(step(group(8)), mode, Limits()).path is path


class _Prices:
    def __init__(self, fixed_us: float = 0.0, **us: float) -> None:
        self.us = us
        self.fixed_us = fixed_us

    def step_us(self, path: Path) -> float:
        return 0.0 if path is Path.STOCK else self.fixed_us

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        return self.us[path.value]


@pytest.mark.parametrize("cheapest", ["stock", "cascade", "dense"])
def test_auto_takes_the_cheapest(cheapest: str) -> None:
    prices = dict.fromkeys(("stock", "cascade", "dense"), 9.0) | {cheapest: 1.0}
    choice = choose(step(group(64)), Mode.AUTO, Limits(), _Prices(**prices))
    assert choice.path.value == cheapest


@pytest.mark.parametrize(("fixed_us", "path"), [(7.9, Path.DENSE), (8.0, Path.STOCK)])
def test_auto_shares_only_what_pays_for_its_launches(fixed_us: float, path: Path) -> None:
    choice = choose(step(group(64)), Mode.AUTO, Limits(), _Prices(fixed_us, stock=9.0, cascade=9.0, dense=1.0))
    assert choice.path is path


class _Linear:
    """Stock by the row, dense at a fixed price: they cross at 100 rows."""

    def step_us(self, path: Path) -> float:
        return 0.0

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        return {Path.STOCK: 1.0 * len(group.rows), Path.CASCADE: 1e6, Path.DENSE: 100.0}[path]


class _Fixed(_Linear):
    """Sharing saves 1 us per row beyond the first, and costs 100 us once: it pays from 102 rows."""

    def step_us(self, path: Path) -> float:
        return 0.0 if path is Path.STOCK else 100.0

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        return 1.0 * len(group.rows) if path is Path.STOCK else 1.0


def paths_of(sizes: list[int], cost: _Linear | None, mode: Mode = Mode.AUTO, hysteresis: float = 0.03) -> list[Path]:
    dispatcher = Dispatcher(Limits(dense_m_eff=400, hysteresis=hysteresis))
    made = [step(dataclasses.replace(group(rows), node_id=7)) for rows in sizes]
    return [dispatcher.choose(each, mode, cost).path for each in made]


@pytest.mark.parametrize("cost", [None, _Linear(), _Fixed()])
def test_auto_near_its_threshold_switches_at_most_once(cost: _Linear | None) -> None:
    sizes = [99, 101, 98, 102, 100, 99, 103, 98, 102] * 3
    steady, nervous = paths_of(sizes, cost), paths_of(sizes, cost, hysteresis=0.0)
    assert sum(a is not b for a, b in itertools.pairwise(steady)) <= 1
    assert sum(a is not b for a, b in itertools.pairwise(nervous)) > 10


@pytest.mark.parametrize("cost", [None, _Linear(), _Fixed()])
def test_auto_does_switch_for_a_real_gain(cost: _Linear | None) -> None:
    low, high, back = paths_of([80, 130, 80], cost)
    assert low is back
    assert low is not high


def test_the_seeds_rule_has_no_memory() -> None:
    assert paths_of([100, 99, 100], None, Mode.FULL) == [Path.DENSE, Path.CASCADE, Path.DENSE]


def test_another_mode_or_cost_model_forgets_what_was_kept() -> None:
    dispatcher, near = Dispatcher(Limits(dense_m_eff=400)), step(dataclasses.replace(group(99), node_id=7))
    assert dispatcher.choose(step(dataclasses.replace(group(100), node_id=7)), Mode.AUTO, None).path is Path.DENSE
    assert dispatcher.choose(near, Mode.AUTO, None).path is Path.DENSE
    assert dispatcher.choose(near, Mode.FULL, None).path is Path.CASCADE
    assert dispatcher.choose(near, Mode.AUTO, None).path is Path.CASCADE


@settings(max_examples=60)
@given(
    history=st.lists(st.lists(st.integers(1, 130), min_size=0, max_size=3), min_size=1, max_size=6),
    has_cost=st.booleans(),
)
def test_a_dispatcher_is_the_chain_of_its_choices(history: list[list[int]], has_cost: bool) -> None:
    """Two ranks that see the same steps agree, and memory is nothing but the paths of the step before."""
    limits, cost = Limits(dense_m_eff=400), _Fixed() if has_cost else None
    ranks, kept = (Dispatcher(limits), Dispatcher(limits)), {}
    for sizes in history:
        groups = [dataclasses.replace(group(rows, first=200 * i), node_id=i) for i, rows in enumerate(sizes)]
        asked = step(*groups)
        first, second = (rank.choose(asked, Mode.AUTO, cost) for rank in ranks)
        assert first == second == choose(asked, Mode.AUTO, limits, cost, kept)
        assert ranks[0].choose(dataclasses.replace(asked, seq_lens=(9000,)), Mode.AUTO, cost) is first
        kept = {each.node_id: path for each, path in zip(groups, first.paths, strict=True)}


class _NearlyEqual(_Linear):
    """Dense saves 2 of 100 us, less than the hysteresis; sharing anything costs 5 us once."""

    def step_us(self, path: Path) -> float:
        return 0.0 if path is Path.STOCK else 5.0

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float:
        return {Path.STOCK: 1.0 * len(group.rows), Path.CASCADE: 1e6, Path.DENSE: 98.0}[path]


def test_a_group_that_did_not_change_is_asked_again_when_it_was_moved() -> None:
    """Alone its sharing did not pay, so it was on stock; in company it would pay, and stock is still near enough."""
    dispatcher, (near, far) = Dispatcher(Limits()), (group(100), group(130, first=100))
    near, far = dataclasses.replace(near, node_id=7), dataclasses.replace(far, node_id=8)
    assert dispatcher.choose(step(near), Mode.AUTO, _NEARLY_EQUAL).paths == (Path.STOCK,)
    assert dispatcher.choose(step(near, far), Mode.AUTO, _NEARLY_EQUAL).paths == (Path.STOCK, Path.DENSE)
    assert choose(step(near, far), Mode.AUTO, Limits(), _NEARLY_EQUAL).paths == (Path.DENSE, Path.DENSE)


_NEARLY_EQUAL = _NearlyEqual()


def test_auto_prefers_stock_on_a_tie() -> None:
    assert choose(step(group(64)), Mode.AUTO, Limits(), _Prices(stock=1.0, cascade=1.0, dense=1.0)).path is Path.STOCK


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    mode=st.sampled_from(Mode),
    threshold=st.integers(1, 3000),
    contiguous=st.booleans(),
)
def test_a_choice_is_total_deterministic_and_never_dense_without_a_run(
    sizes: list[int], mode: Mode, threshold: int, contiguous: bool
) -> None:
    groups, first = [], 0
    for rows in sizes:
        groups.append(group(rows, contiguous=contiguous, first=first))
        first += rows
    asked = step(*groups)
    choice = choose(asked, mode, Limits(dense_m_eff=threshold))
    assert choice == choose(asked, mode, Limits(dense_m_eff=threshold))
    assert len(choice.paths) == len(choice.reasons) == len(groups)
    assert all(choice.reasons)
    assert contiguous or Path.DENSE not in choice.paths
    if mode is Mode.FULL:
        for shared, path in zip(groups, choice.paths, strict=True):
            dense = contiguous and len(shared.rows) > 1 and asked.m_eff(shared) >= threshold
            assert (path is Path.DENSE) == dense


def test_a_group_covers_what_it_says() -> None:
    with pytest.raises(LayoutError, match="cover 3 tokens, the group says 4"):
        PrefixGroup((0, 1), 4, (Segment(1, 3),))


def test_an_unknown_path_names_the_allowed_ones() -> None:
    with pytest.raises(PrefixOnceError, match="'dens' is unknown; allowed: stock, paged, cascade, dense, full, auto"):
        Mode.parse("dens")
