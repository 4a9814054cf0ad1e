"""The bench on a real GPU: graphs, cold rotation, counters and every implementation that needs no long compilation."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from prefixbench.machine.telemetry import Sampler
from prefixbench.measures.kernel import registry
from prefixbench.measures.kernel.ceilings import measure_ceilings
from prefixbench.measures.kernel.cell import measure_cell
from prefixbench.measures.kernel.inputs import Shape, make_inputs, sets_for_cold_l2
from prefixbench.measures.kernel.timing import GraphClock, TimingPlan

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("suffix", [0, 256])
def test_a_cell_in_graphs_warm_and_cold(suffix: int) -> None:
    shape = Shape(4096, suffix, 64, 32, 8, 128, 16, "bfloat16", "shared-contiguous")
    sets = sets_for_cold_l2(shape, torch.cuda.get_device_properties(GPU).L2_cache_size)
    names = [name for name in registry.serving(shape, GPU) if not name.startswith("flashinfer")]
    assert {"dense", "cascade", "paged"} <= set(names)
    outcomes = measure_cell(
        make_inputs(shape, sets=sets, device=GPU, seed=1),
        [registry.named(name) for name in names],
        clock=GraphClock(),
        plan=TimingPlan(),
        l2=("warm", "cold"),
        watch=lambda: Sampler([0], 0.02),
    )
    for name, outcome in outcomes.items():
        assert outcome.failure is None, (name, outcome.failure)
        assert outcome.correctness is not None
        assert outcome.correctness.passed, (name, outcome.correctness)
        warm, cold = outcome.timings
        assert median(cold.samples_us) > 0.9 * median(warm.samples_us), name
        assert outcome.telemetry[0].samples, name


def test_ceilings_are_those_of_a_gpu() -> None:
    ceilings = measure_ceilings(GraphClock(), GPU)
    assert ceilings.copy_bytes_per_s > 5e11
    assert ceilings.matmul_flops_per_s > 5e13
    assert ceilings.l2_bytes > 1 << 20
