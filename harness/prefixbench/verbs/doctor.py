"""`prefixbench doctor`: what this machine has, which platform would run, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from prefixbench.engines.checkpoints import cache_dir
from prefixbench.machine import environment
from prefixbench.verbs.parser import Parser

Level = Literal["ok", "note", "missing"]

_PINS = {"sglang": "0.5.16", "torch": "2.11.0", "triton": "3.6.0"}
_PYTHON = ((3, 11), (3, 13))
_NEEDED_DISK_BYTES = 2 << 30
_STYLES = {"ok": "green", "note": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. "missing" keeps `run` from working here, "note" limits it; `remedy` says what to do."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when something is missing that `prefixbench run` needs here."""
    parser = Parser(prog="prefixbench doctor", description=__doc__)
    parser.parse_args(argv)
    findings = tuple(examine())
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        mark = f"[{_STYLES[finding.level]}]{finding.level:<8}[/]"
        console.print(f"{mark}{finding.subject}: {escape(finding.found + remedy)}")
    return 1 if any(finding.level == "missing" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Looks at this machine now; imports nothing heavy."""
    yield _python()
    for name, pin in _PINS.items():
        yield _package(name, pin)
    has_gpu = bool(environment.gpus())
    yield from _gpus()
    yield _flashinfer(has_gpu)
    yield _plugin()
    yield _platform(has_gpu)
    yield from _counters(has_gpu)
    yield _disk()
    yield _load()


def _python() -> Finding:
    found, (low, high) = platform.python_version(), _PYTHON
    if low <= sys.version_info[:2] < high:
        return Finding("Python", "ok", found)
    return Finding("Python", "missing", found, "use Python 3.11 or 3.12")


def _package(name: str, pin: str) -> Finding:
    found = environment.version(name)
    if found is None:
        return Finding(name, "missing", "not installed", "pip install 'prefixonce[sglang]'")
    if found.partition("+")[0] != pin:
        return Finding(name, "missing", f"{found}, tested with {pin}", f"pip install {name}=={pin}")
    return Finding(name, "ok", found)


def _gpus() -> Iterator[Finding]:
    found = environment.gpus()
    if not found:
        yield Finding("GPU", "note", "none visible to the driver", "gpus=cpu works; GPU claims cannot be checked here")
        return
    for index, gpu in enumerate(found):
        yield Finding(f"GPU {index}", "ok", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {gpu.driver}")
    yield Finding("CUDA of the driver", "ok", environment.cuda_version() or "unknown")


def _flashinfer(has_gpu: bool) -> Finding:
    found = environment.version("flashinfer-python")
    if found is not None:
        return Finding("FlashInfer", "ok", found)
    level: Level = "missing" if has_gpu else "note"
    return Finding("FlashInfer", level, "not installed", "the stock backend on GPUs; pip install 'prefixonce[sglang]'")


def _plugin() -> Finding:
    names = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "prefixonce" not in names:
        return Finding("SGLang plugin", "missing", "not registered", "pip install -e . registers it")
    module = names["prefixonce"].partition(":")[0]
    if importlib.util.find_spec(module) is None:
        return Finding("SGLang plugin", "missing", f"{module} is registered but gone", "reinstall prefixonce")
    whitelist = os.environ.get("SGLANG_PLUGINS")
    if whitelist and "prefixonce" not in whitelist.split(","):
        return Finding("SGLang plugin", "note", f"SGLANG_PLUGINS={whitelist} leaves it out", "unset SGLANG_PLUGINS")
    return Finding("SGLang plugin", "ok", f"prefixonce -> {names['prefixonce']}")


def _platform(has_gpu: bool) -> Finding:
    names = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    if has_gpu:
        return Finding("platform", "ok", "CUDA (gpus=1, 2 or 4); gpus=cpu takes the CPU reference platform")
    if "prefixonce_cpu" in names:
        return Finding("platform", "ok", "the CPU reference platform, prefixonce_cpu")
    return Finding("platform", "missing", "no GPU and no CPU platform", "pip install ./kernels/platform-cpu")


def _counters(has_gpu: bool) -> Iterator[Finding]:
    if not has_gpu:
        return
    found = shutil.which("ncu")
    if found:
        yield Finding("hardware counters", "ok", found)
    else:
        remedy = "install Nsight Compute for measured DRAM and L2 bytes"
        yield Finding("hardware counters", "note", "ncu is not on PATH: traffic is modelled, not counted", remedy)


def _disk() -> Finding:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.0f} GiB free here; checkpoints are kept in {cache_dir()}"
    if free < _NEEDED_DISK_BYTES:
        return Finding("disk", "missing", text, "free at least 2 GiB")
    return Finding("disk", "ok", text)


def _load() -> Finding:
    cpus, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    text = f"{cpus} cores, load {load:.1f}"
    if load > cpus / 2:
        return Finding("CPU", "note", text, "other work runs here; timings of gpus=cpu will be worse and noisier")
    return Finding("CPU", "ok", text)
