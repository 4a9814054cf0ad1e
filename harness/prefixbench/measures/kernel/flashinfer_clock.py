"""FlashInfer's own benchmark timing as a second clock: do its microseconds agree with ours for the same launches?"""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median

from prefixbench.measures.kernel.timing import Run, TimingPlan

NAME = "flashinfer.testing.bench_gpu_time_with_cudagraph, warm L2"


def is_available() -> bool:
    return find_spec("flashinfer") is not None


def median_us(run: Run, plan: TimingPlan) -> float:
    """Median microseconds of one launch on data set 0, as FlashInfer times it: a CUDA graph of `plan.launches`, its own
    warm-up and its own events. The L2 is left warm, as for our `warm` timing; nothing of our clock takes part."""
    from flashinfer.testing import bench_gpu_time_with_cudagraph

    measured_ms: list[float] = bench_gpu_time_with_cudagraph(
        lambda: run(0),
        dry_run_iters=plan.warmup,
        repeat_iters=plan.repetitions,
        num_iters_within_graph=plan.launches,
        cold_l2_cache=False,
    )
    return 1e3 * median(measured_ms)
