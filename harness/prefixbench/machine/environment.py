"""What the machine is, observed when asked; nothing here is a setting and nothing is probed at import."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
from pathlib import Path

import psutil

from prefixbench.record import Environment, Gpu

PACKAGES = (
    "prefixonce",
    "sglang",
    "torch",
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "transformers",
    "numpy",
    "hydra-core",
)
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_CODE = ("kernels", "harness", "conf", "pyproject.toml")


def observe() -> Environment:
    """One reading of this machine; what cannot be found out is None."""
    commit, dirty = git_state()
    return Environment(
        hostname=socket.gethostname(),
        os=platform.platform(),
        python=platform.python_version(),
        cpu=cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus(),
        packages={name: version(name) for name in PACKAGES},
        git_commit=commit,
        git_dirty=dirty,
        cuda=cuda_version(),
    )


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def gpus() -> tuple[Gpu, ...]:
    """GPUs that this process may use (CUDA_VISIBLE_DEVICES), in that order; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    found = []
    for index, visible in enumerate(visible_devices(pynvml.nvmlDeviceGetCount())):
        by_number = visible.isdigit()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(visible)
        )
        name = _text(pynvml.nvmlDeviceGetName(handle))
        found.append(Gpu(name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), driver, _sm_count(index)))
    return tuple(found)


def visible_devices(count: int) -> tuple[str, ...]:
    """Numbers or UUIDs of the GPUs that CUDA shows to this process, of `count` in the machine."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(map(str, range(count)))
    return tuple(name.strip() for name in chosen.split(",") if name.strip())


def cuda_version() -> str | None:
    """The CUDA version that the driver serves, "13.0"; None without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
    except pynvml.NVMLError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout this code runs from; (None, None) when it is not a checkout."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    root = _git(here.parent, "rev-parse", "--show-toplevel")
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = None if root is None else _git(Path(root), "status", "--porcelain", "--", *_CODE)
    return commit, None if changes is None else bool(changes)


def plugin_digest() -> str:
    """Twelve hex digits over the source of kernels and plugin: what a record of the plugin was measured with."""
    spec = importlib.util.find_spec("prefixonce")
    if spec is None or spec.origin is None:
        return "not installed"
    folder = Path(spec.origin).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json", ".cu")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _sm_count(index: int) -> int | None:
    """Asked of the driver itself: torch would create a context on the GPU that is about to be measured."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, count = ctypes.c_int(), ctypes.c_int()
    answers = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device),
    )
    return None if any(answers) else count.value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
