"""SIGTERM and SIGHUP end a run as Ctrl-C does, so that servers are stopped and the last line says what is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """A signal that is ignored (nohup) or handled already (by a launcher) is left alone."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(s) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
