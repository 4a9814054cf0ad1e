"""Expected step time and speed-up of each path, before anything is installed, with the error bound of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefixbench.analysis.roofline.checks import Hardware, KernelCheck, StepCheck
from prefixbench.analysis.roofline.fit import Fitted, fit, transfer
from prefixbench.analysis.roofline.model import PATHS, Ceilings, Load, ModelShape, PathName, memory_bytes, step_time

FITTED_ON = "h200"


@dataclass(frozen=True)
class Range:
    """An expected value with the bounds that the model's residuals give."""

    expected: float
    low: float
    high: float

    @classmethod
    def around(cls, expected: float, log_bound: float) -> Range:
        return cls(expected, expected * math.exp(-log_bound), expected * math.exp(log_bound))


@dataclass(frozen=True)
class Prediction:
    """One path under one load. `speedup` is over stock; `fits`: do weights and K/V fit into the GPU's memory?"""

    path: PathName
    load: Load
    step_ms: Range
    tok_s: Range
    speedup: Range
    prefix_share: float
    fits: bool

    @property
    def pays(self) -> str:
        """yes and no only where the whole range says so."""
        return "yes" if self.speedup.low > 1 else "no" if self.speedup.high < 1 else "unclear"


def model_of(
    gpu: Ceilings, hardware: Hardware, kernels: Sequence[KernelCheck] = (), steps: Sequence[StepCheck] = ()
) -> Fitted:
    """The model for a GPU: fitted where there are checks of it, else carried over from the GPU that has most.

    Checks from records replace published kernels of the same kind and add to the published steps.
    """
    measured = {check.op for check in kernels if check.gpu == gpu.name}
    all_kernels = [c for c in hardware.kernels if c.gpu == gpu.name and c.op not in measured]
    all_kernels += [c for c in kernels if c.gpu == gpu.name]
    all_steps = [c for c in (*hardware.steps, *steps) if c.gpu == gpu.name]
    if {"dense", "cascade", "suffix", "stock"} <= {check.op for check in all_kernels}:
        return fit(gpu, hardware, all_kernels, all_steps)
    return transfer(gpu, hardware, model_of(hardware.gpu(FITTED_ON), hardware))


def predict(model: ModelShape, fitted: Fitted, load: Load, largest_suffix: int) -> list[Prediction]:
    """Every path under this load. `largest_suffix` (prompt and output) decides whether it fits."""
    stock = step_time(fitted.gpu, model, load, "stock", fitted.steps)
    fits = memory_bytes(model, load, largest_suffix) <= fitted.gpu.memory_bytes
    predictions = []
    for path in PATHS:
        step = step_time(fitted.gpu, model, load, path, fitted.steps)
        bound = fitted.bounds[path]
        predictions.append(
            Prediction(
                path,
                load,
                Range.around(1e3 * step.total_s, bound),
                Range.around(step.tok_s, bound),
                Range.around(stock.total_s / step.total_s, fitted.speedup_bounds[path]),
                step.prefix_share,
                fits,
            )
        )
    return predictions
