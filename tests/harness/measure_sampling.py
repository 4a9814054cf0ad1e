"""What telemetry costs: CPU time of the sampling thread per second watched. Run it with `python`, no arguments."""

from __future__ import annotations

import json
import sys
import threading
import time

from prefixbench.machine import environment
from prefixbench.machine.telemetry import Sampler, open_feeds

_WATCH_S = 20.0


class Timed:
    """A feed whose reads are timed on their own thread's CPU clock."""

    def __init__(self, feed) -> None:
        self._feed = feed
        self.source, self.device, self.note = feed.source, feed.device, feed.note
        self.cpu_s = 0.0
        self.reads = 0

    def read(self):
        began_s = time.thread_time()
        sample = self._feed.read()
        if threading.current_thread() is not threading.main_thread():
            self.cpu_s += time.thread_time() - began_s
            self.reads += 1
        return sample


def main() -> None:
    feeds = [Timed(feed) for feed in open_feeds(range(len(environment.gpus())))]
    with Sampler(None, feeds=feeds):
        time.sleep(_WATCH_S)
    for feed in feeds:
        share = feed.cpu_s / _WATCH_S
        sys.stdout.write(
            json.dumps({"source": feed.source, "reads": feed.reads, "share_of_one_core": round(share, 5)}) + "\n"
        )


if __name__ == "__main__":
    main()
