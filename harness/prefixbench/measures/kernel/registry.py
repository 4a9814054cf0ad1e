"""Every implementation by name, and which of them serve a shape."""

from __future__ import annotations

import torch

from prefixbench.hints import unknown
from prefixbench.measures.kernel import flashinfer_peers, ours, torch_peers
from prefixbench.measures.kernel.implementation import Implementation
from prefixbench.measures.kernel.inputs import Shape


def implementations() -> dict[str, Implementation]:
    modules = (ours, flashinfer_peers, torch_peers)
    return {found.name: found for module in modules for found in module.implementations()}


def named(name: str) -> Implementation:
    known = implementations()
    if name not in known:
        raise unknown("implementation", name, known)
    return known[name]


def serving(shape: Shape, device: torch.device) -> tuple[str, ...]:
    """Names of all implementations that serve this shape on this device, ours first."""
    return tuple(name for name, found in implementations().items() if found.unsupported(shape, device) is None)
