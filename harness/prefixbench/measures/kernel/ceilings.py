"""What this chip reaches today, in this process: the two rates that every kernel is held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixbench.measures.kernel.timing import Clock


@dataclass(frozen=True)
class Ceilings:
    """`copy_bytes_per_s` counts bytes read plus bytes written; `matmul_flops_per_s` is a square bf16 product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    l2_bytes: int


def measure_ceilings(
    clock: Clock, device: torch.device, *, copy_bytes: int = 1 << 32, matmul_size: int = 8192, repetitions: int = 7
) -> Ceilings:
    """Medians over `repetitions`, on random data: zeros are faster than what real work sees."""
    source = torch.randn(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_us = _median_us(clock, lambda: target.copy_(source), repetitions)
    del source, target
    a, b = (torch.randn(matmul_size, matmul_size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul_us = _median_us(clock, lambda: torch.mm(a, b, out=out), repetitions)
    is_cuda = device.type == "cuda"
    l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size) if is_cuda else 0
    return Ceilings(2e6 * (copy_bytes // 4 * 4) / copy_us, 2e6 * matmul_size**3 / matmul_us, l2_bytes)


def _median_us(clock: Clock, call: Callable[[], object], repetitions: int) -> float:
    for _ in range(2):
        call()
    readings = [clock.time_us(call) for _ in range(repetitions)]
    clock.settle()
    return statistics.median(read() for read in readings)
