"""Workloads: what is sent, when, and how much of it is really shared. Seeds change the prompts, never the shape."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixbench.case import Settings
from prefixbench.errors import UsageError
from prefixbench.workloads.base import Draft, PromptSpec, Sizes, Tokens, Workload, parse_settings
from prefixbench.workloads.churn import ChurnOptions, churn
from prefixbench.workloads.sharegpt import ShareGptOptions, sharegpt
from prefixbench.workloads.sharing import measure_sharing
from prefixbench.workloads.synthetic import (
    RolloutsOptions,
    SharedPrefixOptions,
    TenantsOptions,
    distinct,
    rollouts,
    shared_prefix,
    tenants,
)

__all__ = ["NAMES", "PromptSpec", "Workload", "build"]


@dataclass(frozen=True)
class _Kind:
    options: type[Any]
    draft: Callable[[Sizes, Any, Tokens], Draft]


_KINDS = {
    "shared-prefix": _Kind(SharedPrefixOptions, shared_prefix),
    "distinct": _Kind(SharedPrefixOptions, distinct),
    "rollouts": _Kind(RolloutsOptions, rollouts),
    "tenants": _Kind(TenantsOptions, tenants),
    "churn": _Kind(ChurnOptions, churn),
    "sharegpt": _Kind(ShareGptOptions, sharegpt),
}
NAMES = tuple(_KINDS)


def build(
    name: str,
    settings: Settings,
    *,
    prefix_tokens: int,
    suffix_tokens: int,
    output_tokens: int,
    concurrency: int,
    vocab_size: int,
    seed: int,
) -> Workload:
    """The prompts of one block. The same arguments give the same prompts on every machine; another seed, others.

    Raises UsageError for an unknown name or setting and for sizes or files that cannot give the workload asked for.
    """
    if name not in _KINDS:
        raise UsageError(f"workload {name!r} is unknown; allowed: {', '.join(NAMES)}")
    if seed < 0:
        raise UsageError(f"seed={seed}: must be 0 or more")
    sizes = Sizes(prefix_tokens, suffix_tokens, output_tokens, concurrency, vocab_size)
    options = parse_settings(name, _KINDS[name].options, settings)
    tokens = Tokens(np.random.default_rng([seed, zlib.crc32(name.encode())]), vocab_size)
    draft = _KINDS[name].draft(sizes, options, tokens)
    note = {"seed": seed, **measure_sharing(draft.requests), **(draft.note or {})}
    return Workload(name, draft.requests, draft.primers, note)
