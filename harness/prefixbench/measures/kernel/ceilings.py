"""What this chip reaches today, in this process: the two rates that every kernel is held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixbench.measures.kernel.timing import Clock

_REPETITIONS = 7


@dataclass(frozen=True)
class Ceilings:
    """`copy_bytes_per_s` counts bytes read plus bytes written; `matmul_flops_per_s` is a square product, bf16 on a GPU
    and fp32 on a CPU. `l2_bytes` 0 where it is not known."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    l2_bytes: int


def measure_ceilings(clock: Clock, device: torch.device) -> Ceilings:
    """Sizes far over every cache on a GPU; on a CPU small ones, whose rates only say what kind of machine it is."""
    is_cuda = device.type == "cuda"
    l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size) if is_cuda else 0
    return Ceilings(
        _copy_bytes_per_s(clock, device, (1 << 32) if is_cuda else (1 << 27)),
        _matmul_flops_per_s(clock, device, 8192 if is_cuda else 768, torch.bfloat16 if is_cuda else torch.float32),
        l2_bytes,
    )


def _copy_bytes_per_s(clock: Clock, device: torch.device, size_bytes: int) -> float:
    source = torch.randn(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2e6 * size_bytes / _median_us(clock, lambda: target.copy_(source))


def _matmul_flops_per_s(clock: Clock, device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Random data: zeros run faster than anything real."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2e6 * size**3 / _median_us(clock, lambda: torch.mm(a, b, out=out))


def _median_us(clock: Clock, call: Callable[[], object]) -> float:
    for _ in range(2):
        call()
    readings = [clock.time_us(call) for _ in range(_REPETITIONS)]
    clock.settle()
    return statistics.median(read() for read in readings)
