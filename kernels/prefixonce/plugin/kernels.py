"""Picks the kernels of a device; the only place of the plugin that knows one device from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from prefixonce import cpu
from prefixonce.errors import UnsupportedError
from prefixonce.plugin.runtime import ModelShape, Runtime
from prefixonce.step import Choice, DecodeStep, Sharing


class Kernels(Protocol):
    """What the host decides is planned once per step and run once per layer; shapes as in `prefixonce.cpu`."""

    def fits(self, step: DecodeStep, sharing: Sharing) -> bool: ...

    def plan(self, step: DecodeStep, choice: Choice, table: Tensor, rows: Tensor, *, padded_batch: int) -> Any: ...

    def plan_capture(self, variant: Any, table: Tensor, rows: Tensor) -> Any: ...

    def run(
        self, plan: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float, out: Tensor
    ) -> Tensor: ...


class CpuKernels:
    """Plain torch; plans are index tensors without a fixed size, and there are no graphs to capture."""

    def __init__(self, on_prefix_s: Callable[[float], None] | None) -> None:
        self._on_prefix_s = on_prefix_s

    def fits(self, step: DecodeStep, sharing: Sharing) -> bool:
        return True

    def plan(self, step: DecodeStep, choice: Choice, table: Tensor, rows: Tensor, *, padded_batch: int) -> cpu.CpuPlan:
        return cpu.plan(step, choice, table, rows)

    def plan_capture(self, variant: Any, table: Tensor, rows: Tensor) -> Any:
        raise UnsupportedError("a CPU has no graphs to capture; leave CUDA graphs off")

    def run(
        self, plan: cpu.CpuPlan, q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float, out: Tensor
    ) -> Tensor:
        return cpu.run(plan, q, k, v, scale=scale, soft_cap=soft_cap, out=out, on_prefix_s=self._on_prefix_s)


def kernels_for(device_type: str, shape: ModelShape, runtime: Runtime, **limits: Any) -> Kernels:
    """`limits` (max_batch, pool_slots, dtype) size the static buffers of a GPU."""
    if device_type == "cpu":
        return CpuKernels(runtime.add_prefix_s if runtime.settings.timers else None)
    if device_type == "cuda":
        from prefixonce.plugin.cuda import CudaKernels

        return CudaKernels(shape, device=device_type, **limits)
    raise UnsupportedError(f"device {device_type!r} has no kernels in this version; allowed: cpu, cuda")
