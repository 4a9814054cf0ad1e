"""How much of a set of prompts is really shared, measured on the token ids themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prefixbench.case import Settings
from prefixbench.workloads.base import PromptSpec


def measure_sharing(requests: Sequence[PromptSpec]) -> Settings:
    """Counts, over all prompts: tokens; tokens that lie in a prefix some other prompt has too (`shared_tokens`); tokens
    a radix tree would hold (`distinct_tokens`); groups of requests meant to share, and the largest of them."""
    prompts = sorted(np.asarray(request.input_ids, dtype=">u4").tobytes() for request in requests)
    arrays = [np.frombuffer(prompt, dtype=">u4") for prompt in prompts]
    # In sorted order the longest prefix that a prompt has in common with any other is one with a neighbour.
    common = [_common(first, second) for first, second in pairwise(arrays)]
    shared = [max(before, after) for before, after in zip([0, *common], [*common, 0], strict=True)]
    total = sum(len(array) for array in arrays)
    sizes = Counter(request.prefix_id for request in requests if request.prefix_id is not None)
    groups = [size for size in sizes.values() if size > 1]
    return {
        "requests": len(requests),
        "prompt_tokens": total,
        "shared_tokens": sum(shared),
        "shared_fraction": sum(shared) / total,
        "distinct_tokens": total - sum(common),
        "groups": len(groups),
        "largest_group": max(groups, default=0),
        "output_tokens": sum(request.max_new_tokens for request in requests),
    }


def _common(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
