"""The plugin's state in one scheduler process: what the tree knows, what the next step does, what was counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixonce.dispatch import CostModel, Dispatcher, Limits
from prefixonce.plugin.counters import Counters
from prefixonce.plugin.grouping import RunningRows
from prefixonce.plugin.settings import PluginSettings
from prefixonce.plugin.timers import NoTimers, Timers
from prefixonce.step import Choice, DecodeStep, Mode, Path, PrefixGroup, Sharing

SeqLens = npt.NDArray[np.int64]
_UNSHARED = (Mode.STOCK, Mode.PAGED)  # nobody asks which rows share what
_NO_SHARING = Sharing((), 0, 0)


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
    sharing: Sharing


class Runtime:
    """Scheduler, tree and model runner of a rank share one process and one thread; this is where they meet."""

    def __init__(self, settings: PluginSettings) -> None:
        self.settings = settings
        self.mode = settings.mode
        # What `auto` asks; without it, `auto` follows the seed's rule like `full`.
        self.cost: CostModel | None = settings.profile
        self.counters = Counters()
        # The three below are set when the scheduler has built model runner and tree.
        self.shape: ModelShape | None = None
        self.rows: RunningRows[Any] | None = None
        self.timers: Timers = NoTimers()
        self._dispatcher = Dispatcher(Limits(settings.dense_m_eff, min_prefix_tokens=settings.min_prefix_tokens))
        self._decided: tuple[Choice, Sharing] | None = None
        self._pending: PlannedStep | None = None

    def plan(self, requests: Sequence[Any], seq_lens: SeqLens) -> None:
        """Decides the next decode step; what did not change since the step before is not looked at again."""
        began_s = perf_counter()
        groups: tuple[PrefixGroup, ...] = ()
        rows_id: object = None
        if self.mode not in _UNSHARED:
            assert self.rows is not None
            groups = self.rows.groups_of(requests)
            rows_id = self.rows.rows_id
        step = self._step(seq_lens, groups, rows_id)
        choice = self._dispatcher.choose(step, self.mode, self.cost)
        if self._decided is None or self._decided[0] is not choice:
            self._decided = choice, Sharing.of(groups, choice)
        self._pending = PlannedStep(step, *self._decided)
        self.counters.plan_s += perf_counter() - began_s

    def take(self, seq_lens: SeqLens, fits: Callable[[DecodeStep, Sharing], bool]) -> PlannedStep | None:
        """Hands out the planned step, once, to the forward it was made for.

        None for a forward that nobody planned (warm-up, graph capture). Other rows than planned, or a step that does
        not fit the kernels' buffers, are served by stock, which needs no plan, and counted as such.
        """
        planned, self._pending = self._pending, None
        if planned is None:
            return None
        if planned.choice.path is not Path.STOCK:
            if not _are_equal(planned.step.lengths, seq_lens):
                planned = self._stock(seq_lens, "not the step that was planned")
            elif not fits(planned.step, planned.sharing):
                planned = self._stock(seq_lens, "the slot lists outgrow the static buffers")
        assert self.shape is not None
        self.counters.count_step(planned.step, planned.choice, planned.sharing, self.shape.kv_token_bytes)
        return planned

    def _stock(self, seq_lens: SeqLens, reason: str) -> PlannedStep:
        return PlannedStep(self._step(seq_lens, ()), Choice(Path.STOCK, (), (), reason), _NO_SHARING)

    def _step(self, seq_lens: SeqLens, groups: tuple[PrefixGroup, ...], rows_id: object = None) -> DecodeStep:
        shape = self.shape
        assert shape is not None
        return DecodeStep(seq_lens, shape.num_q_heads, shape.num_kv_heads, shape.head_dim, groups, rows_id)

    def drop_plan(self) -> None:
        """A batch that is no plain decode makes an earlier plan void."""
        self._pending = None

    def add_prefix_s(self, seconds: float) -> None:
        self.counters.add_seconds("prefix_s", seconds)

    def reset_counters(self) -> None:
        self.counters = Counters()


def _are_equal(planned: SeqLens, now: SeqLens) -> bool:
    # Mostly they are, and then their bytes are: a fraction of numpy's time.
    return planned.tobytes() == now.tobytes() or np.array_equal(planned, now)
