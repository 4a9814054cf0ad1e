"""flashinfer_clock: the same launches go to FlashInfer's own timing, warm, and come back in microseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from prefixbench.measures.kernel import flashinfer_clock
from prefixbench.measures.kernel.timing import TimingPlan


def test_it_asks_for_the_plan_s_launches_and_gives_the_median_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def timed(fn: Callable[[], object], **options: object) -> list[float]:
        fn()
        asked.update(options)
        return [0.2, 0.1, 0.4]

    testing = ModuleType("flashinfer.testing")
    testing.bench_gpu_time_with_cudagraph = timed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.testing", testing)
    ran: list[int] = []
    assert flashinfer_clock.median_us(ran.append, TimingPlan(launches=7, warmup=2, repetitions=9)) == pytest.approx(200)
    assert ran == [0], "data set 0, as our warm timing"
    assert asked == {"dry_run_iters": 2, "repeat_iters": 9, "num_iters_within_graph": 7, "cold_l2_cache": False}
