"""The CPU paths in torch: paged, cascade and dense decode with fp32 arithmetic and natural-log LSE merge.

These serve real requests on a machine without a GPU, so they read a shared prefix once, exactly as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from prefixonce.errors import LayoutError
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup, Segment, SlotPiece

# Rows are served in chunks of at most this many padded keys, which bounds the scratch memory of ragged batches.
_CHUNK_TOKENS = 65_536


class _Partial(NamedTuple):
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    rows: Tensor
    slots: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    rows: Tensor
    pieces: tuple[Segment | Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """Index tensors of one step, made once and used by every layer."""

    shared: tuple[_Shared, ...]
    own: tuple[_Chunk, ...]


def plan(step: DecodeStep, choice: Choice, table: Tensor, rows: Tensor) -> CpuPlan:
    """`table` int32 [table_rows, max_context] maps (row, position) to a slot; `rows` int64 [batch] picks the row."""
    seq_lens = step.lengths.tolist()
    first_own = [0] * step.batch_size
    shared = []
    for group, path in zip(step.groups, choice.paths, strict=True):
        if path not in (Path.CASCADE, Path.DENSE):
            continue
        shared.append(_Shared(torch.tensor(group.rows), _pieces(group, path)))
        for row in group.rows:
            if group.prefix_tokens > seq_lens[row]:
                raise LayoutError(f"row {row} has {seq_lens[row]} tokens, its prefix {group.prefix_tokens}")
            first_own[row] = group.prefix_tokens
    return CpuPlan(tuple(shared), tuple(_chunks(seq_lens, first_own, table, rows)))


def run(
    plan: CpuPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    on_prefix_s: Callable[[float], None] | None = None,
) -> Tensor:
    """Attention of one layer: q [batch, q_heads, head_dim], k and v [slots, kv_heads, head_dim] -> like q.

    `on_prefix_s` is told the wall seconds that the shared prefixes took, their merge included.
    """
    acc = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf)
    for chunk in plan.own:
        part = _own_keys(q[chunk.rows], k, v, chunk, scale, soft_cap)
        acc[chunk.rows], lse[chunk.rows] = part
    began_s = perf_counter()
    for group in plan.shared:
        part = _Partial(acc[group.rows], lse[group.rows])
        queries = q[group.rows]
        for piece in group.pieces:
            keys, values = _load(piece, k, v)
            part = _merge(part, _shared_keys(queries, keys, values, scale, soft_cap))
        acc[group.rows], lse[group.rows] = part
    if on_prefix_s is not None and plan.shared:
        on_prefix_s(perf_counter() - began_s)
    if out is None:
        return acc.to(q.dtype)
    return out.copy_(acc)


def attend(
    step: DecodeStep,
    choice: Choice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    rows: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """`run(plan(...))` for callers with a single layer; shapes as there."""
    return run(plan(step, choice, table, rows), q, k, v, scale=scale, soft_cap=soft_cap, out=out)


def _pieces(group: PrefixGroup, path: Path) -> tuple[Segment | Tensor, ...]:
    if path is Path.DENSE:
        return tuple(piece if isinstance(piece, Segment) else piece.slots for piece in group.pieces)
    return (torch.cat([_slots(piece) for piece in group.pieces]),)


def _slots(piece: Segment | SlotPiece) -> Tensor:
    if isinstance(piece, SlotPiece):
        return piece.slots.to(torch.int64)
    return torch.arange(piece.start_slot, piece.start_slot + piece.length_tokens)


def _load(piece: Segment | Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(piece, Segment):
        run = slice(piece.start_slot, piece.start_slot + piece.length_tokens)
        return k[run], v[run]
    return k[piece], v[piece]


def _chunks(seq_lens: Sequence[int], first_own: Sequence[int], table: Tensor, rows: Tensor) -> list[_Chunk]:
    own = sorted((seq_lens[i] - first_own[i], i) for i in range(len(seq_lens)) if seq_lens[i] > first_own[i])
    chunks = []
    while own:
        longest = own[-1][0]
        take = own[-max(1, _CHUNK_TOKENS // longest) :]
        del own[-len(take) :]
        index = torch.tensor([i for _, i in take])
        lengths = torch.tensor([length for length, _ in take])
        starts = torch.tensor([first_own[i] for _, i in take])
        position = torch.arange(longest).minimum(lengths.unsqueeze(1) - 1) + starts.unsqueeze(1)
        slots = table[rows[index].unsqueeze(1), position].to(torch.int64)
        chunks.append(_Chunk(index, slots, lengths))
    return chunks


def _own_keys(q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, scale: float, soft_cap: float) -> _Partial:
    batch, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    queries = q.float().view(batch, kv_heads, q_heads // kv_heads, head_dim)
    keys = k[chunk.slots].float().permute(0, 2, 3, 1)
    values = v[chunk.slots].float().permute(0, 2, 1, 3)
    scores = _cap(torch.matmul(queries, keys) * scale, soft_cap)
    padding = torch.arange(chunk.slots.shape[1]) >= chunk.lengths.unsqueeze(1)
    scores.masked_fill_(padding[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), values)
    return _Partial(out.reshape(batch, q_heads, head_dim), lse.reshape(batch, q_heads))


def _shared_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, soft_cap: float) -> _Partial:
    """All queries of a group against one piece: one matrix product per KV head (Hydragen, Juravsky et al. 2024)."""
    batch, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    gqa = q_heads // kv_heads
    queries = q.float().view(batch, kv_heads, gqa, head_dim).transpose(0, 1).reshape(kv_heads, batch * gqa, head_dim)
    scores = _cap(torch.matmul(queries, k.float().permute(1, 2, 0)) * scale, soft_cap)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(scores.sub_(lse.unsqueeze(-1)).exp_(), v.float().transpose(0, 1))
    out = out.view(kv_heads, batch, gqa, head_dim).transpose(0, 1).reshape(batch, q_heads, head_dim)
    return _Partial(out, lse.view(kv_heads, batch, gqa).transpose(0, 1).reshape(batch, q_heads))


def _cap(scores: Tensor, soft_cap: float) -> Tensor:
    return scores if soft_cap <= 0.0 else soft_cap * torch.tanh(scores / soft_cap)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """`b` always has keys here; `a` may be empty (lse -inf, out 0), which gives `b` unchanged."""
    lse = torch.logaddexp(a.lse, b.lse)
    return _Partial(
        a.out * torch.exp(a.lse - lse).unsqueeze(-1) + b.out * torch.exp(b.lse - lse).unsqueeze(-1),
        lse,
    )
