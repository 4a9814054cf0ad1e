"""The fp64 oracle of one case, and the verdict on an implementation's result: maxima, with bounds from the dtype."""

from __future__ import annotations

import math

import torch

from prefixbench.measures.kernel.implementation import Result
from prefixbench.measures.kernel.inputs import Inputs
from prefixbench.record import Correctness
from prefixonce import reference
from prefixonce.reference import Partial

LSE_BOUND = 2e-4
"""Absolute, natural log: fp32 accumulation of some thousand exponentials stays ten times under it."""

NAME = "fp64 softmax"


def oracle(inputs: Inputs) -> Partial:
    """Attention of data set 0 in fp64: out [batch, q_heads, head_dim], lse [batch, q_heads], natural log."""
    q, k, v, scale = inputs.q[0], inputs.k[0], inputs.v[0], inputs.scale
    if inputs.shape.layout == "unique":
        return reference.decode(q, k, v, list(inputs.row_slots), scale=scale)
    parts = []
    if inputs.shape.prefix_tokens:
        slots = inputs.prefix_slots[0]
        parts.append(reference.attention(q, k[slots], v[slots], scale=scale))
    if inputs.shape.suffix_tokens:
        parts.append(reference.decode(q, k, v, list(inputs.suffix_slots), scale=scale))
    return parts[0] if len(parts) == 1 else reference.merge(*parts)


def judge(result: Result, truth: Partial) -> Correctness:
    """Largest error of the output, bound two units in the last place of the largest true value; a wrong LSE or a NaN
    fails as well. Products of rounded probabilities stay under one such unit, a lost or doubled page does not."""
    bound = 2 * torch.finfo(result.out.dtype).eps * float(truth.out.abs().max())
    error = float((result.out.double() - truth.out).abs().max())
    lse_error = None if result.lse is None else float((result.lse.double() - truth.lse).abs().max())
    # A comparison with NaN is false, so what is not finite fails.
    return Correctness(
        max_abs_error=error if math.isfinite(error) else None,
        bound=bound,
        passed=error <= bound and (lse_error is None or lse_error <= LSE_BOUND),
        oracle=NAME,
        lse_error=lse_error if lse_error is not None and math.isfinite(lse_error) else None,
        lse_bound=None if lse_error is None else LSE_BOUND,
    )
