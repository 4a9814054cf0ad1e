"""Faults planted on purpose (PREFIXONCE_TEST_FAULT), so that a check which cannot fail is found out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from prefixonce.errors import UnsupportedError
from prefixonce.step import Piece, PrefixGroup, Segment


class FaultKind(Enum):
    NONE = "none"
    ZERO_PREFIX = "zero-prefix"
    PERMUTE_PREFIX = "permute-prefix"
    SLEEP = "sleep-us"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind = FaultKind.NONE
    sleep_us: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        name, _, amount = text.partition(":")
        known = {kind.value: kind for kind in FaultKind}
        wants_amount = name == FaultKind.SLEEP.value
        if name not in known or wants_amount != (amount.isascii() and amount.isdigit()):
            raise UnsupportedError(
                f"PREFIXONCE_TEST_FAULT={text!r} is unknown; allowed: none, zero-prefix, permute-prefix, sleep-us:N"
            )
        return cls(known[name], int(amount) if wants_amount else 0)

    @property
    def corrupts(self) -> bool:
        return self.kind in (FaultKind.ZERO_PREFIX, FaultKind.PERMUTE_PREFIX)

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.sleep_us}" if self.kind is FaultKind.SLEEP else self.kind.value

    def delay(self) -> None:
        """Slows one decode step down."""
        if self.kind is FaultKind.SLEEP:
            time.sleep(self.sleep_us * 1e-6)

    def corrupt(self, groups: Iterable[PrefixGroup], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K/V [slots, kv_heads, head_dim] as a broken kernel would see the shared prefixes; the pool stays intact.

        Attention ignores the order of its keys, so a permutation must move the values against the keys.
        """
        if not self.corrupts:
            return k, v
        k, v = k.clone(), v.clone()
        for group in groups:
            for piece in group.pieces:
                slots = _slots(piece, k.device)
                if self.kind is FaultKind.ZERO_PREFIX:
                    k[slots] = 0
                    v[slots] = 0
                else:
                    v[slots] = v[slots].roll(1, dims=0)
        return k, v


NO_FAULT = Fault()


def _slots(piece: Piece, device: torch.device) -> Tensor:
    if isinstance(piece, Segment):
        return torch.arange(piece.start_slot, piece.start_slot + piece.length_tokens, device=device)
    return piece.slots
