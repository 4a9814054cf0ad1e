"""Where the K/V of a new radix node lies: a contiguous run if it is long enough, else pages. Decided once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixonce.layout import run_start
from prefixonce.step import Piece, Segment, SlotPiece

Layout = Literal["contiguous", "paged"]
_KEPT_EVENTS = 512


class Event(NamedTuple):
    """kind: create, place, split, evict or flush."""

    sequence: int
    kind: str
    node_id: int
    tokens: int
    layout: Layout | None
    detail: str


class RunPool(Protocol):
    """The KV pool as placement needs it; slots are int64 tensors on the pool's device."""

    def take_run(self, tokens: int) -> int | None:
        """First slot of a free run of whole pages, now taken; None if there is none."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies K/V of all layers between slots, ordered after every forward launched so far."""

    def free(self, slots: Tensor) -> None: ...


class Placement:
    """The layout of every live node: what it got at creation; no promotion, no demotion, splits inherit it."""

    def __init__(self, pool: RunPool, min_run_tokens: int) -> None:
        self._pool = pool
        self._min_run_tokens = min_run_tokens
        self._starts: dict[int, int] = {}
        # Since the start: nodes by layout and reason, and the tokens of them by layout.
        self.nodes: Counter[tuple[Layout, str]] = Counter()
        self.tokens: Counter[Layout] = Counter()
        # Nodes whose slots the host did not know in time.
        self.device_waits = 0
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._sequence = 0

    def place(
        self, node_id: int, slots: Tensor, known: NDArray[np.int64] | None = None, *, can_split: bool = False
    ) -> Tensor | None:
        """Gives a new prompt node its slots: those it came with if they are a run, as they are unless the prefill found
        none, else those of a run if it can have one by now.

        None, and nothing is decided, if there is no run for a node that can be split. `known`: the same slots on the
        host; without them it waits for the device.
        """
        tokens = slots.numel()
        if not self.is_worth_a_run(tokens):
            return self._stay_paged(node_id, slots, f"shorter than {self._min_run_tokens} tokens")
        if known is None:
            known = slots.cpu().numpy()
            self.device_waits += 1
        start = run_start(known)
        if start is not None:
            self._settle(node_id, tokens, start, "already contiguous")
            return slots
        start = self._pool.take_run(tokens)
        if start is None:
            return None if can_split else self._stay_paged(node_id, slots, "no free run is long enough")
        target = torch.arange(start, start + tokens, dtype=slots.dtype, device=slots.device)
        self._pool.copy(slots, target)
        self._pool.free(slots)
        self._settle(node_id, tokens, start, "moved into a run")
        return target

    def is_worth_a_run(self, tokens: int) -> bool:
        return tokens >= self._min_run_tokens

    def leave(self, node_id: int, tokens: int) -> None:
        """A node created when a request finished: mostly its own output, not worth a copy."""
        self._note("create", node_id, tokens, None, "finished request")
        self._count("paged", node_id, tokens, "output of a finished request")

    def split(self, upper_id: int, upper_tokens: int, lower_id: int, lower_tokens: int) -> None:
        """`lower_id` keeps the old node's identity; both halves of a run are runs."""
        start = self._starts.get(lower_id)
        layout: Layout = "paged"
        if start is not None:
            self._starts[upper_id] = start
            self._starts[lower_id] = start + upper_tokens
            layout = "contiguous"
        self._note("split", upper_id, upper_tokens, layout, f"{lower_tokens} tokens stay in node {lower_id}")

    def evict(self, node_id: int, tokens: int) -> None:
        layout: Layout = "paged" if self._starts.pop(node_id, None) is None else "contiguous"
        self._note("evict", node_id, tokens, layout, "")

    def flush(self) -> None:
        self._starts.clear()
        self._note("flush", -1, 0, None, "")

    def piece(self, node_id: int, slots: Tensor) -> Piece:
        """A node's K/V as the kernels see it; `slots` int64 [tokens] are the node's."""
        start = self._starts.get(node_id)
        tokens = slots.numel()
        return SlotPiece(slots, tokens) if start is None else Segment(start, tokens)

    def start_of(self, node_id: int) -> int | None:
        return self._starts.get(node_id)

    def to_json(self, pool_slots: int, before: Iterable[object], after: Iterable[object]) -> dict[str, object]:
        return {
            "contiguous": self._count_of("contiguous"),
            "paged": self._count_of("paged"),
            "reasons": {reason: count for (_, reason), count in self.nodes.items()},
            "device_waits": self.device_waits,
            "events": [list(event) for event in self.events],
            "events_dropped": self._sequence - len(self.events),
            "pool_slots": pool_slots,
            "pool_before": list(before),
            "pool_after": list(after),
        }

    def _count_of(self, layout: Layout) -> int:
        return sum(count for (placed, _), count in self.nodes.items() if placed == layout)

    def _stay_paged(self, node_id: int, slots: Tensor, reason: str) -> Tensor:
        self._note("create", node_id, slots.numel(), None, "prompt")
        self._count("paged", node_id, slots.numel(), reason)
        return slots

    def _settle(self, node_id: int, tokens: int, start: int, reason: str) -> None:
        self._note("create", node_id, tokens, None, "prompt")
        self._starts[node_id] = start
        self._count("contiguous", node_id, tokens, reason)

    def _count(self, layout: Layout, node_id: int, tokens: int, reason: str) -> None:
        self.nodes[layout, reason] += 1
        self.tokens[layout] += tokens
        self._note("place", node_id, tokens, layout, reason)

    def _note(self, kind: str, node_id: int, tokens: int, layout: Layout | None, detail: str) -> None:
        self.events.append(Event(self._sequence, kind, node_id, tokens, layout, detail))
        self._sequence += 1
