"""What only a GPU can show: replayed graphs, 64-bit offsets, bfloat16, thousands of random shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os

import pytest
import torch

from kernel_problems import Problem, bound, build, random_shape, shared
from prefixonce.attend import HeadSpec, Pass, StepPlanner, attend
from prefixonce.dispatch import Limits, choose
from prefixonce.step import DecodeStep, Mode, Path, PrefixGroup, Segment, SlotPiece

pytestmark = pytest.mark.gpu

EVERY_PASS = Pass.DENSE | Pass.GATHER | Pass.SUFFIX | Pass.MERGE
# (query heads, KV heads, head_dim): each compiles its own kernels; 64 and 128 take the Hopper kernel if there is one.
HEADS = ((32, 8, 128), (10, 2, 128), (8, 1, 128), (7, 1, 64), (16, 16, 64), (64, 4, 128), (28, 4, 96), (6, 2, 256))
SHAPES_PER_RUN = int(os.environ.get("PREFIXONCE_RANDOM_SHAPES", "40"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS)
def test_random_shapes(heads, dtype):
    """Every path against fp64, and against the paged baseline: at most twice its error on the same input."""
    eps = torch.finfo(dtype).eps
    for seed in range(SHAPES_PER_RUN):
        problem = build(random_shape(seed, heads, dtype), "cuda")
        errors = {}
        for mode in (Mode.PAGED, Mode.CASCADE, Mode.DENSE):
            result = problem.solve(mode)
            errors[mode], lse_error = problem.errors(result)
            assert errors[mode] <= bound(problem), (mode, problem.shape)
            assert lse_error <= 2e-5, (mode, problem.shape)
            assert not result[0][problem.step.batch_size :].any(), (mode, problem.shape)
            assert errors[mode] <= 2 * errors[Mode.PAGED] + eps / 4, (mode, problem.shape)


class _Replay:
    """One captured graph over pools with a long prefix and eight long suffixes; steps are cut from them."""

    def __init__(self, mode: Mode, heads=(32, 8, 128), batch=8) -> None:
        q_heads, kv_heads, head_dim = heads
        self.mode, self.batch = mode, batch
        shape = dataclasses.replace(
            shared(batch, 8192, 0, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16),
            suffixes=(4000,) * batch,
            page_size=16,
        )
        self.pools = build(shape, "cuda")
        self.planner = self.pools.planner(max_tokens=batch * 13_000)
        self.out = torch.full_like(self.pools.q, torch.nan)
        self.prefix = self.pools.slots[0][:8192]

    def step(self, prefix: int, suffix: int, rows: int, shared_rows: int | None = None) -> Problem:
        """`rows` rows with these lengths, the first `shared_rows` of them in one group."""
        pools, members = self.pools, rows if shared_rows is None else shared_rows
        slots = [torch.cat([self.prefix[:prefix], pools.slots[row][8192 : 8192 + suffix + row]]) for row in range(rows)]
        table = torch.zeros(rows + 1, max(map(len, slots)), dtype=torch.int32, device="cuda")
        for row, own in enumerate(slots):
            table[row + 1, : len(own)] = own.int()
        start = int(self.prefix[0])
        piece = Segment(start, prefix) if self.mode is Mode.DENSE else SlotPiece(self.prefix[:prefix], prefix)
        groups = (PrefixGroup(tuple(range(members)), prefix, (piece,)),) if prefix and members else ()
        lengths = tuple(map(len, slots))
        line = [*range(1, rows + 1), *[0] * (self.batch - rows)]
        return dataclasses.replace(
            pools,
            table=table,
            table_rows=torch.tensor(line, device="cuda"),
            step=dataclasses.replace(pools.step, seq_lens=lengths, groups=groups),
            slots=slots,
            _answer=None,
        )

    def run(self) -> None:
        attend(
            self.planner, self.pools.q, self.pools.k, self.pools.v, self.out, scale=self.pools.scale, passes=EVERY_PASS
        )

    def capture(self, problem: Problem) -> torch.cuda.CUDAGraph:
        problem.update(self.planner, self.mode, padded_batch=self.batch)
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            self.run()
        return graph


@pytest.mark.parametrize("mode", [Mode.PAGED, Mode.CASCADE, Mode.DENSE])
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 1, 80)])
def test_graph_captured_short_replays_anything(mode, heads):
    replay = _Replay(mode, heads)
    graph = replay.capture(replay.step(128, 16, 8))
    cases = [(8192, 3900, 8, 8), (0, 100, 5, 0), (128, 16, 3, 2), (8192, 1, 8, 4), (1, 1, 1, 1), (777, 64, 8, 6)]
    for prefix, suffix, rows, members in cases:
        problem = replay.step(prefix, suffix, rows, members)
        problem.update(replay.planner, mode, padded_batch=8, captured=EVERY_PASS)
        replay.out.fill_(torch.nan)
        graph.replay()
        replayed = replay.out.clone()
        replay.out.fill_(torch.nan)
        replay.run()
        assert torch.equal(replayed, replay.out), "the graph gives the bits of the eager call"
        error = (replayed[:rows].double() - problem.answer.out).abs().max().item()
        assert error <= bound(problem), (prefix, suffix, rows)
        assert not replayed[rows:].any()


def test_graph_replays_on_another_prefix():
    problem = build(shared(4, 512, 0, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16), "cuda")
    other = 600 + problem.k.shape[0]
    k = torch.zeros(other + 512, 8, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.full_like(k, torch.nan)
    first = problem.step.groups[0].pieces[0].start_slot
    v[first : first + 512], v[other : other + 512] = 1.0, 2.0
    problem.k, problem.v = k, v
    planner = problem.planner()
    out = torch.empty_like(problem.q)
    problem.update(planner, Mode.DENSE)
    graph = torch.cuda.CUDAGraph()
    attend(planner, problem.q, k, v, out, scale=0.1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attend(planner, problem.q, k, v, out, scale=0.1)
    graph.replay()
    assert torch.equal(out, torch.ones_like(out))
    group = dataclasses.replace(problem.step.groups[0], pieces=(Segment(other, 512),))
    problem.step = dataclasses.replace(problem.step, groups=(group,))
    problem.update(planner, Mode.DENSE, captured=planner.passes)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("mode", [Mode.PAGED, Mode.CASCADE, Mode.DENSE])
def test_slots_beyond_32_bit_offsets(mode, kv_heads):
    """Slot x stride passes 2^31 elements: 4 GiB each of K and V."""
    first = 2**31 // (kv_heads * 128)
    k = torch.zeros(first + 4096, kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    v[first : first + 256] = 1.0
    table = torch.zeros(33, 512, dtype=torch.int32)
    table[1:, :256] = torch.arange(first, first + 256)
    table[1:, 256:] = torch.arange(1, 1 + 32 * 256).view(32, 256)
    table = table.cuda()
    piece = (
        Segment(first, 256) if mode is Mode.DENSE else SlotPiece(torch.arange(first, first + 256, device="cuda"), 256)
    )
    step = DecodeStep((512,) * 32, 4 * kv_heads, kv_heads, 128, (PrefixGroup(tuple(range(32)), 256, (piece,)),))
    planner = StepPlanner(HeadSpec(4 * kv_heads, kv_heads, 128), max_batch=32, max_tokens=32 * 512, device="cuda")
    planner.update(step, choose(step, mode, Limits(dense_m_eff=0)), table, torch.arange(1, 33, device="cuda"))
    q = torch.randn(32, 4 * kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    out = attend(planner, q, k, v, torch.full_like(q, torch.nan), scale=0.1)
    assert torch.equal(out, torch.full_like(out, 0.5))


def test_same_bits_sixty_times():
    problem = build(shared(96, 3000, 100, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16), "cuda")
    for mode in (Mode.PAGED, Mode.CASCADE, Mode.DENSE):
        planner = problem.planner()
        problem.update(planner, mode)
        first = problem.run(planner)
        for _ in range(60):
            again = problem.run(planner)
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])


def test_mixed_paths_in_one_step():
    """One group dense, one through slots, one not shared at all, rows without a group."""
    shape = random_shape(3, (32, 8, 128), torch.bfloat16)
    tokens = itertools.cycle((700, 300, 150))
    problem = build(
        dataclasses.replace(shape, suffixes=tuple(next(tokens) for _ in range(len(shape.suffixes)))), "cuda"
    )
    paths = tuple(path for path, _ in zip(itertools.cycle((Path.DENSE, Path.CASCADE, Path.PAGED)), problem.step.groups))
    planner = problem.planner()
    choice = choose(problem.step, Mode.CASCADE, Limits())
    planner.update(problem.step, dataclasses.replace(choice, paths=paths), problem.table, problem.table_rows)
    problem.q = problem.q[: problem.step.batch_size]
    error, lse_error = problem.errors(problem.run(planner))
    assert error <= bound(problem)
    assert lse_error <= 2e-5
    assert math.isfinite(error)


@pytest.mark.parametrize("heads", [(32, 8, 128), (10, 2, 80)])
@pytest.mark.parametrize("mode", [Mode.PAGED, Mode.CASCADE, Mode.DENSE])
def test_fixed_splits_do_not_see_the_rest_of_the_batch(mode, heads):
    q_heads, kv_heads, head_dim = heads
    problem = build(
        shared(40, 3000, 900, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16), "cuda"
    )
    options = {"split_tokens": 256, "max_batch": 512}
    together = problem.solve(mode, **options)
    rows = [0, 3, 17, 39]
    few = dataclasses.replace(problem, q=problem.q[rows], table_rows=problem.table_rows[rows], _answer=None)
    group = dataclasses.replace(problem.step.groups[0], rows=tuple(range(len(rows))))
    lengths = tuple(problem.step.seq_lens[row] for row in rows)
    few.step = dataclasses.replace(problem.step, seq_lens=lengths, groups=(group,))
    alone = few.solve(mode, **options)
    assert torch.equal(together[0][rows], alone[0])
    assert torch.equal(together[1][rows], alone[1])
