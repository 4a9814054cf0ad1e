"""Inputs of one kernel case: a paged K/V pool in the asked layout, filled with fresh random data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prefixbench.case import KernelCase
from prefixbench.errors import UsageError

LAYOUTS = ("shared-contiguous", "shared-slots", "unique")
"""One prefix in a contiguous run; one prefix in scattered pages; every request its own copy, each contiguous."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SETS = 512


class Shape(NamedTuple):
    """What inputs depend on; implementations that agree in it are compared on the same data."""

    prefix_tokens: int
    suffix_tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    layout: str

    @classmethod
    def of(cls, case: KernelCase) -> Shape:
        return cls(*(getattr(case, name) for name in cls._fields))

    @property
    def readers(self) -> int:
        """How many copies of the prefix there are."""
        return self.batch if self.layout == "unique" else 1

    @property
    def keys(self) -> int:
        """Keys of one row."""
        return self.prefix_tokens + self.suffix_tokens

    @property
    def pool_bytes(self) -> int:
        tokens = self.readers * self.prefix_tokens + self.batch * self.suffix_tokens
        return 2 * tokens * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def check(self) -> None:
        """UsageError for a shape that cannot be laid out."""
        for name in ("batch", "q_heads", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.prefix_tokens + self.suffix_tokens < 1:
            raise UsageError("prefix_len=0 and suffix_len=0: there is nothing to attend to")
        if self.q_heads % self.kv_heads:
            raise UsageError(f"q_heads={self.q_heads} does not divide by kv_heads={self.kv_heads}")
        if self.prefix_tokens % self.page_size:
            raise UsageError(f"prefix_len={self.prefix_tokens}: must be a multiple of page_size={self.page_size}")
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout={self.layout!r}: allowed are {', '.join(LAYOUTS)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={self.dtype!r}: allowed are {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """`q[i]` [batch, q_heads, head_dim], `k[i]` and `v[i]` [slots, kv_heads, head_dim] for each data set i.

    `prefix_slots` int64 [readers, prefix_tokens] (one reader where the prefix is shared) and `suffix_slots` int64
    [batch, suffix_tokens] hold for every set. Page 0 belongs to nobody.
    """

    shape: Shape
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    prefix_slots: Tensor
    suffix_slots: Tensor

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.shape.head_dim)

    @property
    def device(self) -> torch.device:
        return self.prefix_slots.device

    @property
    def row_slots(self) -> Tensor:
        """int64 [batch, prefix_tokens + suffix_tokens]: every row's own view of its context."""
        prefix = self.prefix_slots.expand(self.shape.batch, -1)
        return torch.cat([prefix, self.suffix_slots], dim=1)


def sets_for_cold_l2(shape: Shape, l2_bytes: int) -> int:
    """Data sets to rotate through so that at least twice the L2 passes between two uses of the same one."""
    if shape.pool_bytes >= 32 * l2_bytes:
        return 1  # one launch flushes the cache many times over by itself
    return min(MAX_SETS, math.ceil(2 * l2_bytes / shape.pool_bytes) + 1)


def make_inputs(shape: Shape, *, sets: int, device: torch.device, seed: int) -> Inputs:
    """Standard normal q, K and V; the suffix pages of all requests are shuffled, as a running server leaves them."""
    generator = torch.Generator(device).manual_seed(seed)
    page = shape.page_size
    prefix_pages = shape.readers * (shape.prefix_tokens // page)
    suffix_pages = -(-shape.suffix_tokens // page)
    pages = prefix_pages + shape.batch * suffix_pages
    order = torch.randperm(pages, generator=generator, device=device)
    if shape.layout != "shared-slots":
        inside = torch.arange(prefix_pages, device=device)
        order = torch.cat([inside, order[order >= prefix_pages]])
    prefix = _slots(order[:prefix_pages] + 1, page).view(shape.readers, shape.prefix_tokens)
    suffix = _slots(order[prefix_pages:] + 1, page).view(shape.batch, suffix_pages * page)[:, : shape.suffix_tokens]
    dtype = DTYPES[shape.dtype]

    def draw(*sizes: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(sizes, generator=generator, device=device, dtype=dtype) for _ in range(sets))

    pool = ((pages + 1) * page, shape.kv_heads, shape.head_dim)
    return Inputs(shape, draw(shape.batch, shape.q_heads, shape.head_dim), draw(*pool), draw(*pool), prefix, suffix)


def _slots(pages: Tensor, page_size: int) -> Tensor:
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)).flatten()
