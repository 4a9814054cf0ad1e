"""A server process that cannot outlive the run: started in a group of its own, killed with it, orphans recognised."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from prefixbench.engines.base import ServerFailedError
from prefixbench.record import Status

OWNER_VARIABLE = "PREFIXBENCH_OWNER"

_PR_SET_PDEATHSIG = 1
# A server that is stopped has no request left: nothing is lost when it does not get to drain its queues, which it
# spends ten seconds on. What is killed is gone at once; the wait is for the kernel.
_STOP_GRACE_S = 1.0
_KILLED_WAIT_S = 10.0
_TAIL_BYTES = 64_000
_FATAL = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b:?.*|.*\bprefixonce: .*)$")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|std::bad_alloc", re.I)


class ServerProcess:
    """`command` started with `environment`; both streams go to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        owner = psutil.Process()
        # setproctitle in the server's children would overwrite their environment, by which orphans are recognised.
        marked = {**environment, OWNER_VARIABLE: f"{owner.pid}:{owner.create_time()}", "SPT_NOENV": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            list(command),
            env=marked,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits for readiness; an early death is noticed at once and its reason quoted."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerFailedError(f"the server was not ready after {timeout_s:.0f} s", "timeout", self.tail())
            time.sleep(0.25)

    def check_alive(self) -> None:
        code = self._process.poll()
        if code is None:
            return
        status: Status = "oom" if _OUT_OF_MEMORY.search(self.tail()) else "failed"
        raise ServerFailedError(f"the server ended with code {code}: {fatal_line(self.tail())}", status, self.tail())

    def tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def stacks(self) -> str:
        """Python stacks of every process of the server; empty where py-spy is missing or may not look."""
        spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if spy is None:
            return ""
        dumps = []
        for process in self._tree():
            dump = subprocess.run(
                [spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=30, check=False
            )
            dumps.append(dump.stdout)
        return "\n".join(filter(None, dumps))

    def stop(self) -> None:
        tree = self._tree()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=_STOP_GRACE_S)
        for process in alive:
            _kill(process)
        psutil.wait_procs(alive, timeout=_KILLED_WAIT_S)
        self._process.wait()
        self._file.close()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a child reaches servers of this machine directly, whatever proxy is set."""
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY")
    value = ",".join(filter(None, (exempt, "127.0.0.1", "localhost")))
    return {"NO_PROXY": value, "no_proxy": value}


def fatal_line(log: str) -> str:
    """The line of a log that says why it ends: the last exception, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [line for line in lines if _FATAL.match(line)]
    return (fatal or lines or ["(its log is empty)"])[-1][:300]


def end_orphans() -> int:
    """Kills processes of servers whose run is gone without having stopped them; returns how many."""
    ended = 0
    for process in psutil.process_iter():
        try:
            owner = process.environ().get(OWNER_VARIABLE)
        except psutil.Error:
            continue
        if owner is not None and not _is_running(owner):
            _kill(process)
            ended += 1
    return ended


def _is_running(owner: str) -> bool:
    pid, _, created = owner.partition(":")
    try:
        return psutil.Process(int(pid)).create_time() == float(created)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _die_with_parent() -> None:
    """Runs in the child: Linux kills the server when the run dies, even by SIGKILL. SGLang's children do the same."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
