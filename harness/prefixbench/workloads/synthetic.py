"""Workloads of random tokens: one shared prefix, nothing shared, RL rollouts, tenants under one system prompt."""

from __future__ import annotations

from dataclasses import dataclass

from prefixbench.errors import UsageError
from prefixbench.workloads.base import Draft, PromptSpec, Sizes, Tokens


@dataclass(frozen=True)
class SharedPrefixOptions:
    """`requests` None: as many as are in flight."""

    requests: int | None = None


def shared_prefix(sizes: Sizes, options: SharedPrefixOptions, tokens: Tokens) -> Draft:
    """Every request starts with the same `prefix_tokens`; `suffix_tokens` are its own."""
    prefix = tokens.text(sizes.prefix_tokens)
    suffixes = tokens.texts([sizes.suffix_tokens] * _count(options.requests, sizes))
    group = 0 if prefix else None
    requests = tuple(PromptSpec(prefix + suffix, sizes.output_tokens, prefix_id=group) for suffix in suffixes)
    return Draft(requests, (prefix,) if prefix else ())


def distinct(sizes: Sizes, options: SharedPrefixOptions, tokens: Tokens) -> Draft:
    """The same prompt lengths as `shared-prefix` with nothing in common: what sharing must never slow down."""
    prompts = tokens.texts([sizes.prefix_tokens + sizes.suffix_tokens] * _count(options.requests, sizes))
    return Draft(tuple(PromptSpec(prompt, sizes.output_tokens) for prompt in prompts))


@dataclass(frozen=True)
class RolloutsOptions:
    """`samples` None: as many for each prompt as fill the requests in flight."""

    prompts: int = 32
    samples: int | None = None


def rollouts(sizes: Sizes, options: RolloutsOptions, tokens: Tokens) -> Draft:
    """RL rollouts: `prompts` prompts of `prefix_tokens`, each sampled `samples` times, samples of a prompt in a row.

    `suffix_tokens` are each sample's own (a rollout that is resumed); 0 makes the samples of a prompt identical.
    """
    samples = options.samples
    if samples is None and options.prompts > 0:
        samples, rest = divmod(sizes.concurrency, options.prompts)
        if rest or not samples:
            raise UsageError(
                f"workload rollouts: concurrency={sizes.concurrency} is no multiple of prompts={options.prompts}; "
                "choose another or set samples"
            )
    if options.prompts < 1 or samples is None or samples < 1 or not sizes.prefix_tokens:
        raise UsageError("workload rollouts: prompts, samples and prefix_tokens must be at least 1")
    prompts = tokens.texts([sizes.prefix_tokens] * options.prompts)
    suffixes = tokens.texts([sizes.suffix_tokens] * (options.prompts * samples))
    requests = tuple(
        PromptSpec(prompts[i // samples] + suffix, sizes.output_tokens, prefix_id=i // samples)
        for i, suffix in enumerate(suffixes)
    )
    return Draft(requests, tuple(prompts), {"prompts": options.prompts, "samples": samples})


@dataclass(frozen=True)
class TenantsOptions:
    """`system_share` of `prefix_tokens` is the system prompt that all tenants share; the rest is the tenant's own."""

    tenants: int = 8
    system_share: float = 0.5
    requests: int | None = None


def tenants(sizes: Sizes, options: TenantsOptions, tokens: Tokens) -> Draft:
    """Two-level prefixes: one system prompt, below it one prompt per tenant, requests dealt round the tenants."""
    if options.tenants < 1 or not 0 < options.system_share < 1 or sizes.prefix_tokens < 2:
        raise UsageError("workload tenants: tenants must be at least 1, 0 < system_share < 1, prefix_tokens at least 2")
    system_tokens = min(max(1, round(sizes.prefix_tokens * options.system_share)), sizes.prefix_tokens - 1)
    system = tokens.text(system_tokens)
    prefixes = [system + text for text in tokens.texts([sizes.prefix_tokens - system_tokens] * options.tenants)]
    suffixes = tokens.texts([sizes.suffix_tokens] * _count(options.requests, sizes))
    requests = tuple(
        PromptSpec(prefixes[i % options.tenants] + suffix, sizes.output_tokens, prefix_id=i % options.tenants)
        for i, suffix in enumerate(suffixes)
    )
    return Draft(requests, tuple(prefixes), {"tenants": options.tenants, "system_tokens": system_tokens})


def _count(requests: int | None, sizes: Sizes) -> int:
    if requests is None:
        return sizes.concurrency
    if requests < 1:
        raise UsageError(f"workload setting requests={requests}: must be at least 1")
    return requests
