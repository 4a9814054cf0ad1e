"""The fp64 oracle of one case, and the verdict on an implementation's result: maxima, with bounds from the dtype."""

from __future__ import annotations

import math

import torch

from prefixbench.measures.kernel.implementation import Result
from prefixbench.measures.kernel.inputs import Inputs
from prefixbench.record import Correctness
from prefixonce import reference
from prefixonce.reference import Partial

_FP32_LSE_ERROR = 2e-5  # fp32 sums and fast exp2 and log2: ten times the 2e-6 that they were seen to cost
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


def lse_bound(dtype: torch.dtype, keys: int) -> float:
    """Absolute, natural log. Weights that are rounded to `dtype` before they are summed are each off by at most u, half
    its eps, and so is the LSE; over n keys the roundings average out to u sqrt(sum w^2 / 3), w the softmax, which is
    1.2 u / sqrt(n) for normal inputs in the worst row: six sigma of that. A lost page of 16 among 16,640 shifts it by 4
    such bounds, base 2 for natural by hundreds."""
    u = torch.finfo(dtype).eps / 2
    return max(_FP32_LSE_ERROR, u * min(1.0, 6 * 1.2 / math.sqrt(keys)))


def judge(result: Result, truth: Partial, keys: int) -> Correctness:
    """Largest error of the output, bound two units in the last place of the largest true value; a wrong LSE or a NaN
    fails as well. Products of rounded probabilities stay under one such unit, a lost or doubled page does not. `keys`
    are those of one row."""
    bound = 2 * torch.finfo(result.out.dtype).eps * float(truth.out.abs().max())
    error = float((result.out.double() - truth.out).abs().max())
    most = lse_bound(result.out.dtype, keys)
    lse_error = None if result.lse is None else float((result.lse.double() - truth.lse).abs().max())
    # A comparison with NaN is false, so what is not finite fails.
    return Correctness(
        max_abs_error=error if math.isfinite(error) else None,
        bound=bound,
        passed=error <= bound and (lse_error is None or lse_error <= most),
        oracle=NAME,
        lse_error=lse_error if lse_error is not None and math.isfinite(lse_error) else None,
        lse_bound=None if lse_error is None else most,
    )
