"""The judge: plain attention in torch at a stated precision, natural-log LSE. Knows no kernel and no layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """`out` [..., q_heads, head_dim] normalised within its keys; `lse` [..., q_heads], natural log, -inf if no key."""

    out: Tensor
    lse: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Partial:
    """Every query attends to every key.

    q [rows, q_heads, head_dim], k and v [tokens, kv_heads, head_dim]; query head h uses KV head h // GQA group.
    Arithmetic and both results are in `dtype`; `soft_cap` 0 means off; no key at all gives out 0 and lse -inf.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1) * k_scale
    values = v.to(dtype).repeat_interleave(group, dim=1) * v_scale
    scores = torch.einsum("rhd,thd->rht", q.to(dtype), keys) * scale
    if soft_cap > 0.0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if k.shape[0] == 0:
        return Partial(q.new_zeros(q.shape, dtype=dtype), scores.new_full(q.shape[:2], -torch.inf))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return Partial(torch.einsum("rht,thd->rhd", weights, values), lse)


def decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Sequence[Tensor],
    *,
    scale: float,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Partial:
    """One query per row, each over its own `slots[row]` (int64) of the pools [slots, kv_heads, head_dim]."""
    rows = [
        attention(
            q[i : i + 1],
            k_pool[index],
            v_pool[index],
            scale=scale,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            dtype=dtype,
        )
        for i, index in enumerate(slots)
    ]
    return Partial(torch.cat([row.out for row in rows]), torch.cat([row.lse for row in rows]))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint key sets (online softmax; Milakov and Gimelshein 2018).

    A side whose lse is -inf has weight exactly zero, whatever its `out` holds, NaN included.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    out = torch.zeros_like(a.out)
    for part in (a, b):
        weight = torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - lse)).unsqueeze(-1)
        out = out + torch.where(weight == 0.0, 0.0, part.out * weight)
    return Partial(out, lse)
