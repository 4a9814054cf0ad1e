"""Telemetry: samples in time, feeds that fail, and our own load told from that of others."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import pytest

from prefixbench.machine.clocks import clock_flags
from prefixbench.machine.telemetry import CpuFeed, Sampler, Source, open_feeds
from prefixbench.record import Telemetry, TelemetrySample


@dataclass
class FakeGpu:
    """Plays back (SM clock, throttle bits); the last entry repeats."""

    readings: list[tuple[int, int]]
    source: Source = "nvml"
    device: int | None = 0
    note: str | None = None
    taken: int = field(default=0)

    def read(self) -> TelemetrySample:
        clock, bits = self.readings[min(self.taken, len(self.readings) - 1)]
        self.taken += 1
        return TelemetrySample(at_s=-1.0, sm_clock_mhz=clock, throttle_reasons=bits)


def watch(gpu: FakeGpu, until: Callable[[], bool]) -> tuple[Telemetry, ...]:
    with Sampler([0], interval_s=0.01, feeds=[gpu]) as sampler:
        end_s = time.monotonic() + 60
        while not until() and time.monotonic() < end_s:
            time.sleep(0.01)
    return sampler.telemetry()


def test_samples_are_taken_while_the_block_runs_and_timed_from_its_start() -> None:
    gpu = FakeGpu([(1980, 0)])
    (seen,) = watch(gpu, lambda: gpu.taken >= 3)
    times = [sample.at_s for sample in seen.samples]
    assert len(times) == gpu.taken >= 3
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] > times[0]


class NvmlWithoutDriver:
    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802 (the name that pynvml gives it)
        raise self.NVMLError("Driver Not Loaded")


@pytest.mark.parametrize("module", [None, NvmlWithoutDriver()], ids=["no package", "no driver"])
def test_without_nvml_the_clocks_are_unknown_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, module: NvmlWithoutDriver | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with Sampler([0]) as sampler:
        pass
    (seen,) = sampler.telemetry()
    assert (seen.source, seen.device, seen.samples) == ("none", 0, ())
    assert seen.note is not None
    assert "unknown" in seen.note
    assert clock_flags((seen,)) == ()


def test_a_feed_that_dies_keeps_what_it_saw_and_says_so() -> None:
    died = threading.Event()

    class Dying(FakeGpu):
        def read(self) -> TelemetrySample:
            if self.taken == 2:
                died.set()
                raise RuntimeError("GPU is lost")
            return super().read()

    (seen,) = watch(Dying([(1980, 0)]), died.is_set)
    assert len(seen.samples) == 2
    assert seen.note == "stopped answering: GPU is lost"


def test_cpu_feed_separates_our_load_from_others() -> None:
    (feed,) = open_feeds(None)
    assert isinstance(feed, CpuFeed)
    first = feed.read()
    assert first.load_other is None
    assert first.steal is None
    started_s, own_s = time.perf_counter(), time.process_time()
    while time.process_time() - own_s < 0.2:
        sum(range(10_000))
    elapsed_s = time.perf_counter() - started_s
    second = feed.read()
    assert second.load_other is not None
    assert second.steal is not None
    assert 0 <= second.steal <= 1
    room = (psutil.cpu_count() or 1) - 0.2 / elapsed_s  # CPUs we did not use; the rest of the machine cannot use more
    assert 0 <= second.load_other <= room + 0.15
