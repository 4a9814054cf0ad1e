"""What the machine is, observed when asked; nothing here is a setting and nothing is probed at import."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
from functools import cache
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
    """GPUs that the driver shows, in its order; empty without a driver."""
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
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(pynvml.nvmlDeviceGetName(handle))
        found.append(Gpu(name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), driver, _sm_count(index)))
    return tuple(found)


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


@cache
def _sm_count(index: int) -> int | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
