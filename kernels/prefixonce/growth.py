"""A step in which every row of the step before is one token longer needs no new plan: the last chunk of a row grows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixonce.step import Choice, DecodeStep, PrefixGroup

# A chunk is at least 256 tokens long, so that what grows meanwhile does not upset how chunks are dealt.
MOST_STEPS = 32


class _Planned(NamedTuple):
    rows_id: object
    groups: tuple[PrefixGroup, ...]
    choice: Choice
    padded_batch: int
    lengths: NDArray[np.int64]


class Growth:
    """Follows the plan that the device holds from step to step."""

    def __init__(self) -> None:
        self._planned: _Planned | None = None
        self._steps = 0

    def begin(self, step: DecodeStep, choice: Choice, padded_batch: int) -> None:
        """The plan of this step, which leaves room for `MOST_STEPS` tokens behind every row, is on its way."""
        self._planned = _Planned(step.rows_id, step.groups, choice, padded_batch, step.lengths.copy())
        self._steps = 0

    def end(self) -> None:
        """Whatever the device holds, no later step can use it."""
        self._planned = None

    def steps(self, step: DecodeStep, choice: Choice, padded_batch: int) -> int:
        """How many tokens every row has grown by since the plan, if it serves this step and served all between; else 0.

        Counts this step as served.
        """
        planned = self._planned
        if (
            planned is None
            or step.rows_id is not planned.rows_id
            or step.groups is not planned.groups
            or choice is not planned.choice
            or padded_batch != planned.padded_batch
            or self._steps == MOST_STEPS
        ):
            return 0
        steps = self._steps + 1
        if not ((step.lengths - planned.lengths) == steps).all():
            return 0
        self._steps = steps
        return steps
