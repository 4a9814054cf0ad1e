"""What the bench asks of an implementation, ours or a peer's, and the modelled work of its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prefixbench.case import Settings
from prefixbench.measures.kernel.inputs import Inputs, Shape
from prefixonce import Choice, DecodeStep, Path, PrefixGroup, Segment, SlotPiece
from prefixonce.limits import HeadSpec
from prefixonce.traffic import Traffic, step_traffic


class Result(NamedTuple):
    """`out` [batch, q_heads, head_dim]; `lse` [batch, q_heads], natural log, None where none is offered."""

    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """`run(i)` launches on data set i and returns whatever it does; `result` turns that into comparable form, outside
    the timed part. `note` is what planning found out (splits, the path that runs)."""

    run: Callable[[int], object]
    result: Callable[[object], Result]
    note: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """`path` says how it reads a prefix: STOCK and PAGED once per request, CASCADE and DENSE once per step.

    `unsupported` gives the reason why it cannot serve a shape, or None; planning happens in `prepare`, untimed.
    `compiles` says that its first call builds kernels, which is worth doing ahead.
    """

    name: str
    path: Path
    unsupported: Callable[[Shape, torch.device], str | None]
    prepare: Callable[[Inputs], Prepared]
    compiles: bool = True


def head_spec(shape: Shape) -> HeadSpec:
    return HeadSpec(shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.dtype)


def decode_step(shape: Shape, slots: Tensor | None = None) -> DecodeStep:
    """The step of a shape: one group where the prefix is shared, a group for each request where it is not.

    `slots` int64 [readers, prefix_tokens] are where the prefixes lie; without them they count as contiguous.
    """
    groups = []
    if shape.prefix_tokens:
        for reader in range(shape.readers):
            rows = tuple(range(shape.batch)) if shape.readers == 1 else (reader,)
            piece: Segment | SlotPiece
            if slots is not None and shape.layout == "shared-slots":
                piece = SlotPiece(slots[reader], shape.prefix_tokens)
            else:
                start = shape.page_size + reader * shape.prefix_tokens
                piece = Segment(start, shape.prefix_tokens)
            groups.append(PrefixGroup(rows, shape.prefix_tokens, (piece,), node_id=reader))
    lengths = (shape.prefix_tokens + shape.suffix_tokens,) * shape.batch
    return DecodeStep(lengths, shape.q_heads, shape.kv_heads, shape.head_dim, tuple(groups))


def choice_of(step: DecodeStep, path: Path) -> Choice:
    """Every group on `path`, whatever a dispatcher would think of it."""
    reason = "the benchmark asked for it"
    return Choice(path, (path,) * len(step.groups), (reason,) * len(step.groups), reason)


def work_of(shape: Shape, path: Path) -> Traffic:
    """Modelled bytes and FLOPs of one launch."""
    step = decode_step(shape)
    return step_traffic(head_spec(shape), step, choice_of(step, path))
