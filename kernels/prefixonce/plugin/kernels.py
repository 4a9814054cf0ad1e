"""Picks the kernels of a device; the only place of the plugin that knows one device from another."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from prefixonce.errors import UnsupportedError
from prefixonce.step import Choice, DecodeStep


class Kernels(Protocol):
    """What the host decides is planned once per step and run once per layer; shapes as in `prefixonce.cpu`."""

    def plan(self, step: DecodeStep, choice: Choice, table: Tensor, rows: Tensor) -> Any: ...

    def run(
        self,
        plan: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


def kernels_for(device_type: str) -> Kernels:
    if device_type == "cpu":
        from prefixonce import cpu

        return cpu
    raise UnsupportedError(f"device {device_type!r} has no kernels in this version; allowed: cpu")
