"""One decode step (DecodeStep) and what was decided for it (Choice): all that SGLang and the kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixonce.errors import LayoutError

if TYPE_CHECKING:
    import torch


class Mode(Enum):
    """What the operator asked for. The value doubles as the number sent over SGLang's numeric control call."""

    STOCK = 0  # the wrapped backend of SGLang serves every row
    PAGED = 1  # our paged kernel serves every row; nothing is shared
    CASCADE = 2  # read once through slot lists, contiguity ignored (the seed's SGLang-Cascade)
    DENSE = 3  # read once from contiguous segments wherever the prefix has them
    FULL = 4  # the seed's rule: dense when M_eff reaches the threshold, else cascade
    AUTO = 5  # full plus the cost model, which also knows when stock is fastest

    @classmethod
    def parse(cls, name: str) -> Mode:
        try:
            return cls[name.upper()]
        except KeyError:
            allowed = ", ".join(mode.name.lower() for mode in cls)
            raise LayoutError(f"path {name!r} is unknown; allowed: {allowed}") from None


class Path(Enum):
    """What really ran for a group or a whole step; counters and records use the values."""

    STOCK = "stock"
    PAGED = "paged"
    CASCADE = "cascade"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous run of KV slots: `start_slot .. start_slot + length_tokens`."""

    start_slot: int
    length_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SlotPiece:
    """Prefix tokens at arbitrary slots. `slots`: int64 `[length_tokens]` on the KV pool's device."""

    slots: torch.Tensor
    length_tokens: int


Piece = Segment | SlotPiece


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of the batch that share one prefix, and where its K/V lies, in token order.

    `rows` are ascending batch rows; `pieces` follow the chain of radix nodes from the root, so their lengths sum
    to `prefix_tokens`. `slots` of the whole chain is what cascade reads; contiguity is what dense needs.
    """

    rows: tuple[int, ...]
    prefix_tokens: int
    pieces: tuple[Piece, ...]
    node_id: int = -1

    def __post_init__(self) -> None:
        covered = sum(piece.length_tokens for piece in self.pieces)
        if covered != self.prefix_tokens:
            raise LayoutError(f"prefix pieces cover {covered} tokens, the group says {self.prefix_tokens}")

    @property
    def contiguous_tokens(self) -> int:
        return sum(piece.length_tokens for piece in self.pieces if isinstance(piece, Segment))

    @property
    def is_contiguous(self) -> bool:
        return self.contiguous_tokens == self.prefix_tokens


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """One decode step of one rank, as the host knows it before planning.

    `seq_lens` has one entry per real row (padding rows of a CUDA graph are not rows) and counts the new token.
    No row is in two groups. Head counts are per rank (after tensor parallelism). `rows_id` is the object of an earlier
    step only if the same requests are its rows, in the same order, and their tokens lie where they lay; None: unknown.
    """

    seq_lens: Sequence[int] | npt.NDArray[np.int64]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[PrefixGroup, ...] = ()
    rows_id: object = None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`seq_lens` as an array; free if it is one."""
        return np.asarray(self.seq_lens, np.int64)

    @property
    def gqa_group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def m_eff(self, group: PrefixGroup) -> int:
        """Queries that meet one KV head of this group's prefix: realized batch x GQA group size."""
        return len(group.rows) * self.gqa_group


@dataclass(frozen=True, slots=True)
class Choice:
    """The dispatcher's verdict. `paths[i]` and `reasons[i]` belong to `step.groups[i]`.

    A group whose path is STOCK or PAGED is not shared: its rows are served with the rows that have no group.
    """

    path: Path
    paths: tuple[Path, ...]
    reasons: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """The groups of a step whose prefix really is read once, and the tokens that are so read, over all groups.

    `tokens_per_row` counts every row's prefix, as stock reads it.
    """

    groups: tuple[PrefixGroup, ...]
    tokens_once: int
    tokens_per_row: int

    @classmethod
    def of(cls, groups: tuple[PrefixGroup, ...], choice: Choice) -> Sharing:
        pairs = zip(groups, choice.paths, strict=True)
        shared = tuple(group for group, path in pairs if path in (Path.CASCADE, Path.DENSE))
        return cls(
            shared,
            sum(group.prefix_tokens for group in shared),
            sum(len(group.rows) * group.prefix_tokens for group in shared),
        )
