"""One measuring run per device of this machine: a second one is refused, because each would slow the other's server."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefixbench.errors import EngineError


@contextmanager
def hold(resources: Sequence[str]) -> Iterator[None]:
    """Holds a lock on each resource; the kernel lets go of it when the process ends, however it ends."""
    with ExitStack() as stack:
        for resource in sorted(resources):
            stack.enter_context(_held(resource))
        yield


@contextmanager
def _held(resource: str) -> Iterator[None]:
    folder = Path(tempfile.gettempdir()) / f"prefixbench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{resource}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise EngineError(
                f"{resource} is being measured by process {file.read().strip() or 'unknown'}; wait for it to end, "
                "two runs on one device would spoil each other's figures"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
