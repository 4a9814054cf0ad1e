"""A figure that may be missing, with the reason; and percentiles, which are missing without enough samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A percentile needs this many samples beyond it, or it is the value of one lucky request.
SAMPLES_BEYOND = 5


@dataclass(frozen=True)
class Quantity:
    """A figure, or the reason why there is none."""

    value: float | None
    reason: str | None = None


def percentile(values: Sequence[float], q: float) -> Quantity:
    """The q-quantile (0 < q < 1, linear interpolation) when at least five samples lie beyond it."""
    needed = math.ceil(SAMPLES_BEYOND / min(q, 1 - q) - 1e-9)
    if len(values) < needed:
        return Quantity(None, f"p{100 * q:g} needs {needed} samples, there are {len(values)}")
    return Quantity(float(np.quantile(np.asarray(values, dtype=np.float64), q)))
