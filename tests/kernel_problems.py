"""Decode problems for kernel tests: pools with NaN in every unused slot, groups, lengths, and the fp64 answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from prefixonce import reference
from prefixonce.attend import HeadSpec, StepPlanner, attend
from prefixonce.dispatch import Limits, choose
from prefixonce.step import DecodeStep, Mode, PrefixGroup, Segment, SlotPiece

PAGE_SIZES = (1, 16, 64)


@dataclass
class Group:
    """`pieces` are token counts; True marks a contiguous run."""

    rows: tuple[int, ...]
    pieces: tuple[tuple[int, bool], ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.pieces)


@dataclass
class Shape:
    q_heads: int
    kv_heads: int
    head_dim: int
    suffixes: tuple[int, ...]
    groups: tuple[Group, ...] = ()
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    page_size: int = 1
    soft_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    padding_rows: int = 0
    seed: int = 0


@dataclass
class Problem:
    shape: Shape
    device: str
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    table_rows: Tensor
    step: DecodeStep
    slots: list[Tensor]
    scale: float
    _answer: reference.Partial | None = field(default=None)

    @property
    def spec(self) -> HeadSpec:
        shape = self.shape
        names = [str(dtype).removeprefix("torch.") for dtype in (shape.dtype, self.k.dtype)]
        return HeadSpec(shape.q_heads, shape.kv_heads, shape.head_dim, *names)

    def planner(self, **options) -> StepPlanner:
        tokens = sum(len(slots) for slots in self.slots) + sum(g.prefix_tokens for g in self.step.groups)
        options = {"max_batch": len(self.q), "max_tokens": max(tokens, 1), "device": self.device} | options
        return StepPlanner(self.spec, **options)

    def update(self, planner: StepPlanner, mode: Mode, **options):
        choice = choose(self.step, mode, Limits(dense_m_eff=0, min_rows=1))
        return planner.update(self.step, choice, self.table, self.table_rows, **options)

    def run(self, planner: StepPlanner, **options) -> tuple[Tensor, Tensor]:
        """(out, lse) of the planner's step, both poisoned beforehand."""
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan, dtype=torch.float32, device=self.device)
        shape = self.shape
        scales = {"soft_cap": shape.soft_cap, "k_scale": shape.k_scale, "v_scale": shape.v_scale}
        attend(planner, self.q, self.k, self.v, out, scale=self.scale, lse=lse, **scales, **options)
        return out, lse

    def solve(self, mode: Mode, **options) -> tuple[Tensor, Tensor]:
        planner = self.planner(**options)
        self.update(planner, mode, padded_batch=len(self.q))
        return self.run(planner)

    def before(self, steps: int, rows_id: object = None) -> Problem:
        """The same batch `steps` steps earlier; the table names slot 0, which holds NaN, behind every row's end."""
        lengths = [length - steps for length in self.step.seq_lens]
        slots = [own[:length] for own, length in zip(self.slots, lengths, strict=True)]
        table = torch.zeros_like(self.table)
        for row, own in enumerate(slots):
            table[self.table_rows[row], : len(own)] = own.int()
        step = replace(self.step, seq_lens=np.array(lengths), rows_id=rows_id)
        return replace(self, table=table, step=step, slots=slots, _answer=None)

    @property
    def answer(self) -> reference.Partial:
        """fp64, for the real rows."""
        if self._answer is None:
            shape = self.shape
            self._answer = reference.decode(
                self.q[: self.step.batch_size], self.k, self.v, self.slots, scale=self.scale,
                soft_cap=shape.soft_cap, k_scale=shape.k_scale, v_scale=shape.v_scale,
            )  # fmt: skip
        return self._answer

    def errors(self, result: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Largest absolute error of out and of lse; NaN never passes a comparison with these."""
        rows = self.step.batch_size
        out, lse = (part[:rows].double() for part in result)
        empty = torch.isneginf(self.answer.lse)
        assert torch.equal(empty, torch.isneginf(lse)), "lse is -inf exactly where a row has no key"
        lse_error = torch.where(empty, 0.0, lse - self.answer.lse).abs()
        return _largest((out - self.answer.out).abs()), _largest(lse_error)


def bound(problem: Problem) -> float:
    """Two roundings (weights and output) to the dtype, relative to the largest value that the answer can hold."""
    eps = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[problem.shape.dtype]
    largest = max((problem.v[s].float().abs().amax().item() for s in problem.slots if len(s)), default=0.0)
    return 2 * eps * max(1.0, largest * problem.shape.v_scale)


def build(shape: Shape, device: str = "cpu") -> Problem:
    """Random N(0, 1) tensors; everything outside the used slots, slot 0 included, is NaN."""
    torch.manual_seed(shape.seed)
    rng = random.Random(shape.seed)
    batch = len(shape.suffixes)
    prefix_of = [0] * batch
    needed = sum(shape.suffixes) + sum(group.tokens for group in shape.groups)
    pages = 2 * (needed // shape.page_size + batch + 8 * len(shape.groups) + 2)
    free = list(range(1, pages))
    groups, slots = [], [torch.empty(0, dtype=torch.int64) for _ in range(batch)]
    run_start = pages * shape.page_size
    rng.shuffle(free)

    def paged(tokens: int) -> Tensor:
        count = -(-tokens // shape.page_size)
        base = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64) * shape.page_size
        return (base[:, None] + torch.arange(shape.page_size)).reshape(-1)[:tokens]

    for group in shape.groups:
        pieces, chain = [], []
        for tokens, is_run in group.pieces:
            if is_run:
                pieces.append(Segment(run_start, tokens))
                chain.append(torch.arange(run_start, run_start + tokens))
                run_start += tokens + rng.randrange(1, 9)
            else:
                chain.append(paged(tokens))
                pieces.append(SlotPiece(chain[-1].to(device), tokens))
        groups.append(PrefixGroup(group.rows, group.tokens, tuple(pieces)))
        for row in group.rows:
            prefix_of[row] = group.tokens
            slots[row] = torch.cat(chain)
    for row, tokens in enumerate(shape.suffixes):
        slots[row] = torch.cat([slots[row], paged(tokens)])

    num_slots = run_start + shape.page_size
    kv_dtype = shape.kv_dtype or shape.dtype
    used = torch.zeros(num_slots, dtype=torch.bool)
    used[torch.cat(slots)] = True
    pools = []
    for _ in range(2):
        pool = torch.full((num_slots, shape.kv_heads, shape.head_dim), torch.nan, device=device).to(kv_dtype)
        values = torch.randn(int(used.sum()), shape.kv_heads, shape.head_dim, device=device).to(kv_dtype)
        view = pool.view(torch.uint8) if kv_dtype.itemsize == 1 else pool
        view[used.to(device)] = values.view(view.dtype)
        pools.append(pool)
    table = torch.zeros(batch + 2, max(map(len, slots), default=0) + 1, dtype=torch.int32)
    lines = list(range(1, batch + 1))
    rng.shuffle(lines)
    for row, line in enumerate(lines):
        table[line, : len(slots[row])] = slots[row].to(torch.int32)
    rows = batch + shape.padding_rows
    q = torch.randn(rows, shape.q_heads, shape.head_dim, device=device).to(shape.dtype)
    lengths = tuple(len(row) for row in slots)
    return Problem(
        shape=shape,
        device=device,
        q=q,
        k=pools[0],
        v=pools[1],
        table=table.to(device),
        table_rows=torch.tensor(lines + [0] * shape.padding_rows, dtype=torch.int64, device=device),
        step=DecodeStep(lengths, shape.q_heads, shape.kv_heads, shape.head_dim, tuple(groups)),
        slots=[row.to(device) for row in slots],
        scale=shape.head_dim**-0.5,
    )


def shared(batch: int, prefix: int, suffix: int, *, contiguous: bool = True, **options) -> Shape:
    """One group over the whole batch; suffix of row b is `suffix + b % 3`, or 0 everywhere if `suffix` is 0."""
    heads = {"q_heads": 8, "kv_heads": 2, "head_dim": 64} | options
    suffixes = tuple(suffix + row % 3 if suffix else 0 for row in range(batch))
    groups = (Group(tuple(range(batch)), ((prefix, contiguous),)),) if prefix else ()
    return Shape(suffixes=suffixes, groups=groups, **heads)


def random_shape(seed: int, heads: tuple[int, int, int], dtype: torch.dtype, *, most_tokens: int = 1500) -> Shape:
    """Several groups of mixed pieces, rows without a group, empty suffixes, padding; `heads` is (q, kv, head_dim)."""
    rng = random.Random(seed)
    batch = rng.choice([1, 2, 3, 5, 8, 13, 17, 33, 64])
    free = list(range(batch))
    rng.shuffle(free)
    groups = []
    while free and len(groups) < 4 and rng.random() < 0.75:
        take = rng.randint(1, len(free))
        rows, free = free[:take], free[take:]
        pieces = tuple(
            (
                rng.choice([1, 15, 16, 17, 63, 100, 127, 128, 129, 255, 300, rng.randint(1, most_tokens)]),
                rng.random() < 0.7,
            )
            for _ in range(rng.choice([1, 1, 1, 2, 3, 7]))
        )
        groups.append(Group(tuple(sorted(rows)), pieces))
    suffixes = tuple(rng.choice([0, 1, 2, 16, 33, 64, 65, rng.randint(1, 400)]) for _ in range(batch))
    q_heads, kv_heads, head_dim = heads
    return Shape(
        q_heads, kv_heads, head_dim, suffixes, tuple(groups), dtype,
        page_size=rng.choice(PAGE_SIZES), padding_rows=rng.choice([0, 0, 1, 3]), seed=seed,
    )  # fmt: skip


def _largest(errors: Tensor) -> float:
    return errors.max().item() if errors.numel() else 0.0
