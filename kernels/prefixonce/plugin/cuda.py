"""The CUDA kernels behind the plan/run protocol, and the graph variants that a decode step can replay."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from prefixonce.attend import Pass, StepPlanner, attend
from prefixonce.growth import MOST_STEPS
from prefixonce.limits import HeadSpec
from prefixonce.plugin.runtime import ModelShape
from prefixonce.step import Choice, DecodeStep, Path, Sharing

_BOTH_ENDS = Pass.SUFFIX | Pass.MERGE


class Variant(Enum):
    """A recorded set of launches. A graph for stock is SGLang's own and has no variant."""

    CASCADE = Pass.GATHER | _BOTH_ENDS
    DENSE = Pass.DENSE | _BOTH_ENDS
    MIXED = Pass.DENSE | Pass.GATHER | _BOTH_ENDS  # a contiguous prefix with a paged end, or groups of both kinds

    @property
    def label(self) -> str:
        return f"prefixonce-{self.name.lower()}"

    @classmethod
    def covering(cls, needed: Pass) -> Variant:
        """The one with the fewest launches that runs every pass in `needed`."""
        return next(variant for variant in cls if not needed & ~variant.value)


class CudaKernels:
    """One planner with static buffers serves eager steps and every captured graph of a rank."""

    def __init__(self, shape: ModelShape, *, max_batch: int, pool_slots: int, dtype: torch.dtype, device: str) -> None:
        name = str(dtype).removeprefix("torch.")
        spec = HeadSpec(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, name, name)
        # Rows outside every shared group list their whole context, shared tokens once per row.
        self._max_tokens = 4 * pool_slots
        room_tokens = max_batch * MOST_STEPS
        self._planner = StepPlanner(spec, max_batch=max_batch, max_tokens=self._max_tokens + room_tokens, device=device)

    def fits(self, step: DecodeStep, sharing: Sharing) -> bool:
        """False if the step's slot lists outgrow the static buffers; the stock backend then serves it."""
        if step.batch_size > self._planner.max_batch:
            return False
        own_tokens = int(step.lengths.sum()) - sharing.tokens_per_row
        return own_tokens + sharing.tokens_once <= self._max_tokens

    def plan(self, step: DecodeStep, choice: Choice, table: Tensor, rows: Tensor, *, padded_batch: int) -> Variant:
        """Starts the step's copies on the current stream and says what has to be launched or replayed."""
        needed = self._planner.update(step, choice, table, rows, padded_batch=padded_batch)
        return Variant.covering(needed)

    def plan_capture(self, variant: Variant, table: Tensor, rows: Tensor) -> Variant:
        """A step of one-token rows, so that the launches being recorded find a plan to run."""
        shape = self._planner.spec
        step = DecodeStep((1,) * rows.shape[0], shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        self._planner.update(step, Choice(Path.STOCK, (), (), "capture"), table, rows)
        return variant

    def run(
        self, plan: Variant, q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float, out: Tensor
    ) -> Tensor:
        return attend(self._planner, q, k, v, out, scale=scale, soft_cap=soft_cap, passes=plan.value)
