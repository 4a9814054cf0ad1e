"""Fits the roofline model to measured kernels and steps, and says how far off it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefixbench.analysis.roofline.checks import HEAD_DIM, Hardware, KernelCheck, Residual, StepCheck
from prefixbench.analysis.roofline.model import (
    PAPER,
    PATHS,
    Attention,
    Ceilings,
    Efficiencies,
    PathName,
    Term,
    step_time,
    suffix_seconds,
)

KERNEL_OPS = ("dense", "cascade", "suffix", "stock")
FEWEST_TO_LEAVE_OUT = 4


@dataclass(frozen=True)
class Fitted:
    """The model for one GPU: `kernels` predicts launches, `steps` whole decode steps, `residuals` how far off both are.

    `bounds` are log errors per path: the largest residual among the kernels and steps that its prediction rests on.
    `speedup_bounds` are those of the ratio to stock.
    """

    gpu: Ceilings
    kernels: Efficiencies
    steps: Efficiencies
    residuals: tuple[Residual, ...]
    bounds: Mapping[PathName, float]
    speedup_bounds: Mapping[PathName, float]


def fit(gpu: Ceilings, hardware: Hardware, kernels: Sequence[KernelCheck], steps: Sequence[StepCheck]) -> Fitted:
    """Fits attention to the kernels, then stock reading and the rest of a step to the stock steps."""
    found = _fit_kernels(gpu, kernels)
    whole = _fit_steps(gpu, hardware, found, [c for c in steps if c.path == "stock"])
    errors = {op: _kernel_residuals(gpu, kernels, op) for op in KERNEL_OPS}
    of_steps = {path: _step_residuals(gpu, hardware, whole, steps, path) for path in PATHS}
    largest = {op: _largest(found) for op, found in errors.items()}
    stock = _largest(of_steps["stock"]) * _inflation(len(of_steps["stock"]))
    rests_on: dict[PathName, tuple[str, ...]] = {
        "stock": (),
        "cascade": ("cascade", "suffix"),
        "full": ("cascade", "dense", "suffix"),
        "auto": ("cascade", "dense", "suffix"),
    }
    bounds = {
        path: _largest(of_steps[path])
        if path != "stock" and of_steps[path]
        else max([stock, *(largest[op] for op in ops)])
        for path, ops in rests_on.items()
    }
    everything = [r for rows in (*errors.values(), *of_steps.values()) for r in rows]
    # Errors of two paths that share most of a step cancel in part; adding squares does not count on it.
    ratios = {path: math.hypot(bound, bounds["stock"]) for path, bound in bounds.items()}
    return Fitted(gpu, found, whole, tuple(everything), bounds, {**ratios, "stock": 0.0})


def transfer(gpu: Ceilings, hardware: Hardware, source: Fitted) -> Fitted:
    """The efficiencies of another GPU on this one's ceilings; the bound is how far reported figures were off."""
    rows = _reported(hardware, source.steps)
    steps = {
        check.path: row.log_error
        for row, check in zip(rows[-len(hardware.reported_steps) :], hardware.reported_steps, strict=True)
    }
    ratio = max(abs(error - steps["stock"]) for error in steps.values())
    ratios = {path: 0.0 if path == "stock" else ratio for path in PATHS}
    return Fitted(gpu, source.kernels, source.steps, tuple(rows), dict.fromkeys(PATHS, _largest(rows)), ratios)


def on_paper(hardware: Hardware) -> list[Residual]:
    """The seed's reported figures beside its machine on paper: ceilings only, nothing fitted."""
    rows = []
    for check in hardware.reported_bytes:
        layer, readers = (
            Attention(check.heads, check.kv_heads, HEAD_DIM),
            check.batch if check.layout == "unique" else 1,
        )
        queries_and_outputs = 2 * check.batch * check.heads * HEAD_DIM * layer.element_bytes
        model = readers * layer.kv_bytes(check.prefix) + queries_and_outputs
        rows.append(Residual(check.what, check.gpu, check.bytes, model))
    return rows + _reported(hardware, PAPER)


def _fit_kernels(gpu: Ceilings, kernels: Sequence[KernelCheck]) -> Efficiencies:
    """Two numbers per kind of attention, by least squares on relative errors."""
    suffix = _fit_term([(c.ideal_s(gpu), c.us / 1e6) for c in kernels if c.op == "suffix"])
    known = Efficiencies(suffix=suffix)
    terms = {
        op: _fit_term(
            [
                (c.ideal_s(gpu), c.us / 1e6 - suffix_seconds(gpu, c.layer, c.suffix, c.batch, known))
                for c in kernels
                if c.op == op
            ]
        )
        for op in ("dense", "cascade", "stock")
    }
    return replace(known, **terms)


def _fit_steps(gpu: Ceilings, hardware: Hardware, found: Efficiencies, steps: Sequence[StepCheck]) -> Efficiencies:
    """What a step pays besides attention and matmuls, and the rate at which the engine's stock path re-reads."""
    pairs = []
    for check in steps:
        ideal = step_time(gpu, hardware.model(check.model), check.load, "stock", replace(found, stock=Term()))
        pairs.append((ideal.prefix_s, check.ms / 1e3 - ideal.rest_s - ideal.suffix_s))
    if len(pairs) < 2:
        return found
    term = _fit_term(pairs)
    return replace(found, stock=Term(efficiency=term.efficiency), rest=Term(fixed_s=term.fixed_s))


def _kernel_residuals(gpu: Ceilings, kernels: Sequence[KernelCheck], op: str) -> list[Residual]:
    """Each launch predicted by a fit that has not seen it; with fewer than four the fit has seen them all."""
    checks = [c for c in kernels if c.op == op]
    rows = []
    for check in checks:
        others = [c for c in kernels if c is not check] if len(checks) >= FEWEST_TO_LEAVE_OUT else kernels
        predicted_s = check.predicted_s(gpu, _fit_kernels(gpu, others))
        shape = f"{check.prefix}x{check.batch}+{check.suffix}, {check.heads}/{check.kv_heads} heads"
        rows.append(Residual(f"{op} {shape} (us)", gpu.name, check.us, 1e6 * predicted_s))
    return rows


def _step_residuals(
    gpu: Ceilings, hardware: Hardware, found: Efficiencies, steps: Sequence[StepCheck], path: PathName
) -> list[Residual]:
    rows = []
    for check in steps:
        if check.path == path:
            step = step_time(gpu, hardware.model(check.model), check.load, path, found)
            what = f"{check.model} {path} {check.prefix}x{check.batch} (ms per step)"
            rows.append(Residual(what, gpu.name, check.ms, 1e3 * step.total_s))
    return rows


def _inflation(count: int) -> float:
    """Residuals of points that a two-parameter fit has seen are too small by about this."""
    return math.sqrt(count / (count - 2)) if count > 2 else 1.0


def _largest(rows: Sequence[Residual]) -> float:
    return max((abs(row.log_error) for row in rows), default=0.0)


def _reported(hardware: Hardware, found: Efficiencies) -> list[Residual]:
    rows = []
    for kernel in hardware.reported_kernels:
        gpu = hardware.gpu(kernel.gpu)
        rows.append(Residual(kernel.what, gpu.name, kernel.us, 1e6 * kernel.predicted_s(gpu, found)))
    for check in hardware.reported_steps:
        gpu = hardware.gpu(check.gpu)
        step = step_time(gpu, hardware.model(check.model), check.load, check.path, found)
        rows.append(Residual(check.what, gpu.name, check.batch / check.ms * 1e3, step.tok_s))
    return rows


def _fit_term(pairs: Sequence[tuple[float, float]]) -> Term:
    if len(pairs) < 2:
        return Term(efficiency=pairs[0][0] / pairs[0][1]) if pairs else Term()
    from scipy.optimize import nnls  # takes longer to import than most readers of this module to finish

    ideal, measured = np.array(pairs).T
    (fixed, slope), _ = nnls(np.stack([1 / measured, ideal / measured], axis=1), np.ones(len(pairs)))
    return Term(float(fixed), 1 / float(slope)) if slope > 0 else Term(float(fixed), math.inf)
