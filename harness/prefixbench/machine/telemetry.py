"""Clocks, power, temperature and other load beside a block: sampled in a side thread, stored raw; `clocks` judges them.

A machine that cannot be watched is not an error: its telemetry has no samples and a note that says why.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, Self

import psutil

from prefixbench.record import Telemetry, TelemetrySample

Source = Literal["nvml", "cpu", "none"]

_SLOW_READ_EVERY = 50  # the CPU frequency and the process tree cost milliseconds to read on a machine with many cores


class Feed(Protocol):
    """One watched device. `read` returns a sample whose `at_s` the sampler overwrites."""

    source: Source
    device: int | None
    note: str | None

    def read(self) -> TelemetrySample: ...


class Sampler:
    """Watches devices between `__enter__` and `__exit__`; `at_s` counts from `__enter__`.

    `device_indices` are CUDA's (after CUDA_VISIBLE_DEVICES); None or empty watches the CPU. `feeds` replaces both.
    A feed that fails while running keeps its samples, gets a note and is not asked again.
    """

    def __init__(
        self, device_indices: Sequence[int] | None, interval_s: float = 0.1, feeds: Sequence[Feed] | None = None
    ) -> None:
        self._feeds = tuple(feeds) if feeds is not None else open_feeds(device_indices)
        self._interval_s = interval_s
        self._samples: list[list[TelemetrySample]] = [[] for _ in self._feeds]
        self._notes = [feed.note for feed in self._feeds]
        self._alive = [feed.source != "none" for feed in self._feeds]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()

    def telemetry(self) -> tuple[Telemetry, ...]:
        return tuple(
            Telemetry(feed.source, self._interval_s, feed.device, tuple(samples), note)
            for feed, samples, note in zip(self._feeds, self._samples, self._notes, strict=True)
        )

    def _loop(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        for i, feed in enumerate(self._feeds):
            if not self._alive[i]:
                continue
            try:
                sample = feed.read()
            except (OSError, RuntimeError, psutil.Error) as error:  # losing sight of a device must not end the run
                self._alive[i] = False
                self._notes[i] = f"stopped answering: {error}"
                continue
            self._samples[i].append(replace(sample, at_s=time.perf_counter() - self._start_s))


def open_feeds(device_indices: Sequence[int] | None) -> tuple[Feed, ...]:
    """NVML feeds for these CUDA devices, the CPU feed when none is asked for; never raises."""
    if not device_indices:
        return (CpuFeed(),)
    return tuple(_open_gpu(index) for index in device_indices)


class NoFeed:
    """A device that cannot be watched, and why."""

    source: Source = "none"

    def __init__(self, device: int | None, note: str) -> None:
        self.device = device
        self.note: str | None = note

    def read(self) -> TelemetrySample:
        raise RuntimeError(self.note)


class NvmlFeed:
    """One GPU through NVML (`nvml` is the pynvml module). A reading that this GPU does not offer is None."""

    source: Source = "nvml"
    note: str | None = None

    def __init__(self, nvml: Any, device: int) -> None:
        self.device: int | None = device
        self._nvml = nvml
        nvml.nvmlInit()
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[device] if device < len(visible) else str(device)
        self._handle: Any = (
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        )

    def read(self) -> TelemetrySample:
        nvml, handle = self._nvml, self._handle
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return TelemetrySample(
            at_s=0.0,
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            gpu_utilisation=None if use is None else int(use.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            throttle_reasons=self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        )

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except self._nvml.NVMLError_NotSupported:
            return None
        except self._nvml.NVMLError as error:
            raise RuntimeError(str(error)) from error


class CpuFeed:
    """This machine's CPUs. `load_other`: CPUs kept busy by processes outside our process tree; `steal`: 0 to 1."""

    source: Source = "cpu"
    device: int | None = None
    note: str | None = None

    def __init__(self) -> None:
        self._reads = 0
        self._own: list[psutil.Process] = []
        self._last: tuple[float, float, float, float] | None = None

    def read(self) -> TelemetrySample:
        is_slow_read = self._reads % _SLOW_READ_EVERY == 0
        self._reads += 1
        now = self._now()
        last, self._last = self._last, now
        if is_slow_read:
            me = psutil.Process()
            self._own = [me, *me.children(recursive=True)]
            self._last = self._now()  # a process that joined the tree brings its past along
        sample = TelemetrySample(at_s=0.0, cpu_mhz=_cpu_mhz() if is_slow_read else None)
        if last is None:
            return sample
        elapsed_s, busy_s, steal_s, own_s = (new - old for new, old in zip(now, last, strict=True))
        cpus = psutil.cpu_count() or 1
        return replace(
            sample, load_other=max(0.0, (busy_s - own_s) / elapsed_s), steal=max(0.0, steal_s / (elapsed_s * cpus))
        )

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds: the clock, all CPUs busy, stolen by the hypervisor, spent by our process tree."""
        times = psutil.cpu_times()
        steal_s = float(getattr(times, "steal", 0.0))
        busy_s = float(sum(times)) - float(times.idle) - float(getattr(times, "iowait", 0.0)) - steal_s
        busy_s -= float(getattr(times, "guest", 0.0)) + float(getattr(times, "guest_nice", 0.0))  # inside user and nice
        return time.perf_counter(), busy_s, steal_s, self._own_s()

    def _own_s(self) -> float:
        total_s = 0.0
        for process in self._own:
            try:
                spent = process.cpu_times()
            except psutil.Error:  # ended since the tree was read
                continue
            total_s += spent.user + spent.system
        return total_s


def _open_gpu(index: int) -> Feed:
    unknown = f"GPU {index} is not watched, its clocks are unknown"
    try:
        import pynvml
    except ImportError as error:
        return NoFeed(index, f"{unknown}: {error}")
    try:
        return NvmlFeed(pynvml, index)
    except pynvml.NVMLError as error:
        return NoFeed(index, f"{unknown}: {error}")


def _cpu_mhz() -> float | None:
    frequency = psutil.cpu_freq()
    return None if frequency is None else float(frequency.current)
