"""The plugin's state in one scheduler process: what the tree knows, what the next step does, what was counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from prefixonce.dispatch import CostModel, Limits, choose
from prefixonce.plugin.counters import Counters
from prefixonce.plugin.grouping import Chain, group_rows
from prefixonce.plugin.settings import PluginSettings
from prefixonce.step import Choice, DecodeStep, Path, PrefixGroup


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of one rank. `kv_token_bytes`: K and V of one token over all layers."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_token_bytes: int


class PlannedStep(NamedTuple):
    step: DecodeStep
    choice: Choice


class Runtime:
    """Scheduler, tree and model runner of a rank share one process and one thread; this is where they meet."""

    def __init__(self, settings: PluginSettings) -> None:
        self.settings = settings
        self.mode = settings.mode
        self.limits = Limits(dense_m_eff=settings.dense_m_eff, min_prefix_tokens=settings.min_prefix_tokens)
        # What `auto` asks; without it, `auto` follows the seed's rule like `full`.
        self.cost: CostModel | None = settings.profile
        self.counters = Counters()
        self.shape: ModelShape | None = None
        self._chains: list[Chain] = []
        self._groups: tuple[PrefixGroup, ...] = ()
        self._pending: PlannedStep | None = None

    def plan(self, chains: list[Chain], seq_lens: tuple[int, ...]) -> None:
        """Decides the next decode step. `chains[i]` is the very object of the step before if row i did not change."""
        began_s = perf_counter()
        if not _same(chains, self._chains):
            self._chains, self._groups = chains, group_rows(chains)
        step = self._step(seq_lens, self._groups)
        self._pending = PlannedStep(step, choose(step, self.mode, self.limits, self.cost))
        self.counters.plan_s += perf_counter() - began_s

    def take(self, seq_lens: tuple[int, ...], fits: Callable[[DecodeStep, Choice], bool]) -> PlannedStep | None:
        """Hands out the planned step, once, to the forward it was made for.

        None for a forward that nobody planned (warm-up, graph capture). Other rows than planned, or a step that does
        not fit the kernels' buffers, are served by stock, which needs no plan, and counted as such.
        """
        planned, self._pending = self._pending, None
        if planned is None:
            return None
        if planned.step.seq_lens != seq_lens:
            planned = self._stock(seq_lens, "not the step that was planned")
        elif planned.choice.path is not Path.STOCK and not fits(planned.step, planned.choice):
            planned = self._stock(seq_lens, "the slot lists outgrow the static buffers")
        assert self.shape is not None
        self.counters.count_step(planned.step, planned.choice, self.shape.kv_token_bytes)
        return planned

    def _stock(self, seq_lens: tuple[int, ...], reason: str) -> PlannedStep:
        return PlannedStep(self._step(seq_lens, ()), Choice(Path.STOCK, (), (), reason))

    def _step(self, seq_lens: tuple[int, ...], groups: tuple[PrefixGroup, ...]) -> DecodeStep:
        assert self.shape is not None
        return DecodeStep(seq_lens, self.shape.num_q_heads, self.shape.num_kv_heads, self.shape.head_dim, groups)

    def drop_plan(self) -> None:
        """A batch that is no plain decode makes an earlier plan void."""
        self._pending = None

    def add_prefix_s(self, seconds: float) -> None:
        self.counters.prefix_s = (self.counters.prefix_s or 0.0) + seconds

    def reset_counters(self) -> None:
        self.counters = Counters()


def _same(chains: list[Chain], before: list[Chain]) -> bool:
    return len(chains) == len(before) and all(a is b for a, b in zip(chains, before, strict=True))
