"""The CPU paths against the fp64 reference, on batches with several groups, loners, empty suffixes and ragged rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefixonce import Choice, DecodeStep, Path, PrefixGroup, Segment, SlotPiece, cpu, reference
from prefixonce.errors import LayoutError

# fp32 sums of up to a few hundred terms of size about 1.
_BOUND = 2e-5


@dataclass(frozen=True)
class Pool:
    k: Tensor
    v: Tensor
    table: Tensor
    step: DecodeStep

    def slots(self, row: int) -> Tensor:
        return self.table[row, : self.step.seq_lens[row]].long()


def make_pool(
    groups: Sequence[tuple[int, Sequence[int]]], *, contiguous: bool, loners: Sequence[int] = (), heads=(4, 2), dim=16
) -> Pool:
    """`groups`: (prefix tokens, suffix tokens of each member). Unused slots hold NaN; slot 0 is padding."""
    rows = [(g, length) for g, (_, suffixes) in enumerate(groups) for length in suffixes]
    total = sum(prefix for prefix, _ in groups) + sum(length for _, length in rows) + sum(loners)
    slots_left = torch.arange(1, 2 * total + 2)
    shuffled = slots_left[total + 1 :][torch.randperm(total)]
    k, v = (torch.full((2 * total + 2, heads[1], dim), math.nan) for _ in range(2))
    table = torch.zeros(len(rows) + len(loners), 2 * total + 4, dtype=torch.int32)
    prefixes, pieces, cursor, run = [], [], 0, 1
    for prefix, _ in groups:
        if contiguous:
            chosen = torch.arange(run, run + prefix)
            run += prefix
            pieces.append((Segment(int(chosen[0]), prefix),) if prefix else ())
        else:
            chosen = shuffled[cursor : cursor + prefix]
            cursor += prefix
            pieces.append((SlotPiece(chosen, prefix),))
        prefixes.append(chosen)
    lens = []
    for row, (g, length) in enumerate([*rows, *((-1, length) for length in loners)]):
        own = shuffled[cursor : cursor + length]
        cursor += length
        tokens = torch.cat([prefixes[g], own]) if g >= 0 else own
        table[row, : len(tokens)] = tokens.int()
        lens.append(len(tokens))
    for row, length in enumerate(lens):
        used = table[row, :length].long()
        k[used] = torch.randn(length, heads[1], dim)
        v[used] = torch.randn(length, heads[1], dim)
    members = [tuple(i for i, (g, _) in enumerate(rows) if g == index) for index in range(len(groups))]
    made = tuple(PrefixGroup(m, p, piece) for m, (p, _), piece in zip(members, groups, pieces, strict=True))
    return Pool(k, v, table, DecodeStep(tuple(lens), heads[0], heads[1], dim, made))


def forced(step: DecodeStep, path: Path) -> Choice:
    return Choice(path, (path,) * len(step.groups), ("forced",) * len(step.groups), "forced")


def check(pool: Pool, path: Path, soft_cap: float = 0.0) -> None:
    step = pool.step
    q = torch.randn(step.batch_size, step.num_q_heads, step.head_dim)
    out = cpu.attend(
        step, forced(step, path), q, pool.k, pool.v, pool.table, torch.arange(step.batch_size),
        scale=0.25, soft_cap=soft_cap, out=torch.full_like(q, math.nan),
    )  # fmt: skip
    expected = reference.decode(
        q, pool.k, pool.v, [pool.slots(i) for i in range(step.batch_size)], scale=0.25, soft_cap=soft_cap
    ).out
    assert (out - expected).abs().max() < _BOUND


@pytest.mark.parametrize("path", [Path.PAGED, Path.CASCADE, Path.DENSE])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_paths_agree_with_the_reference(path: Path, contiguous: bool, soft_cap: float) -> None:
    torch.manual_seed(0)
    check(make_pool([(64, [0, 1, 17]), (33, [5, 2])], contiguous=contiguous, loners=[9, 1]), path, soft_cap)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 12), min_size=2, max_size=5)), min_size=1, max_size=3
    ),
    loners=st.lists(st.integers(1, 30), max_size=3),
    gqa=st.sampled_from([1, 2, 5, 7]),
    contiguous=st.booleans(),
    path=st.sampled_from([Path.PAGED, Path.CASCADE, Path.DENSE]),
    seed=st.integers(0, 2**16),
)
def test_any_batch(groups, loners, gqa, contiguous, path, seed) -> None:
    torch.manual_seed(seed)
    check(make_pool(groups, contiguous=contiguous, loners=loners, heads=(2 * gqa, 2)), path)


def test_chunking_does_not_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    pool = make_pool([(8, [40, 3, 3, 20])], contiguous=True, loners=[31])
    monkeypatch.setattr(cpu, "_CHUNK_TOKENS", 30)
    check(pool, Path.CASCADE)


def test_mixed_paths_in_one_step() -> None:
    torch.manual_seed(2)
    pool = make_pool([(16, [1, 2]), (24, [3, 0])], contiguous=True, loners=[4])
    choice = Choice(Path.DENSE, (Path.STOCK, Path.DENSE), ("", ""), "")
    q = torch.randn(5, 4, 16)
    out = cpu.attend(pool.step, choice, q, pool.k, pool.v, pool.table, torch.arange(5), scale=0.25)
    expected = reference.decode(q, pool.k, pool.v, [pool.slots(i) for i in range(5)], scale=0.25).out
    assert (out - expected).abs().max() < _BOUND


def test_shared_keys_are_read_through_the_group() -> None:
    """The group's pieces decide what is read: another prefix gives another answer (a control that must differ)."""
    torch.manual_seed(3)
    pool = make_pool([(32, [2, 2]), (32, [2, 2])], contiguous=True)
    first, second = pool.step.groups
    wrong = PrefixGroup(first.rows, 32, second.pieces)
    step = DecodeStep(pool.step.seq_lens, 4, 2, 16, (wrong, second))
    q = torch.randn(4, 4, 16)
    args = (q, pool.k, pool.v, pool.table, torch.arange(4))
    right = cpu.attend(pool.step, forced(pool.step, Path.DENSE), *args, scale=0.25)
    out = cpu.attend(step, forced(step, Path.DENSE), *args, scale=0.25)
    assert (out[:2] - right[:2]).abs().max() > 0.05
    assert (out[2:] - right[2:]).abs().max() < _BOUND


def test_prefix_longer_than_its_row_is_refused() -> None:
    step = DecodeStep((4, 9), 4, 2, 16, (PrefixGroup((0, 1), 8, (Segment(1, 8),)),))
    pool = torch.zeros(20, 2, 16)
    with pytest.raises(LayoutError, match="row 0 has 4 tokens, its prefix 8"):
        cpu.attend(
            step, forced(step, Path.DENSE), torch.zeros(2, 4, 16), pool, pool,
            torch.zeros(2, 20, dtype=torch.int32), torch.arange(2), scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(("path", "is_timed"), [(Path.DENSE, True), (Path.PAGED, False)])
def test_the_shared_part_is_timed(path: Path, is_timed: bool) -> None:
    pool = make_pool([(4096, [1] * 8)], contiguous=True)
    plan = cpu.plan(pool.step, forced(pool.step, path), pool.table, torch.arange(8))
    told: list[float] = []
    cpu.run(plan, torch.randn(8, 4, 16), pool.k, pool.v, scale=0.25, on_prefix_s=told.append)
    assert len(told) == is_timed
    assert all(seconds > 0 for seconds in told)
