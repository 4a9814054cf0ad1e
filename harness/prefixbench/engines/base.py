"""What the harness asks of an engine: start a server, prime it, switch its path, send a block, read its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prefixbench.errors import EngineError
from prefixbench.record import PlacementTrace, RequestSample, Status, StepCounters
from prefixbench.workloads import PromptSpec


class ServerFailedError(EngineError):
    """The server died, stalled or refused; `status` is what the record of the running case gets."""

    def __init__(self, message: str, status: Status = "failed", detail: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


@dataclass(frozen=True)
class SendPlan:
    """How a block is sent. `in_flight` None: each request at its own arrival time, else at most so many at once."""

    in_flight: int | None
    stream_interval: int


class Server(Protocol):
    """A running server. Every call may raise ServerFailedError; after that only `stop` and `log_tail` are allowed."""

    startup_s: float
    command: tuple[str, ...]
    url: str  # where, and with which checkpoint, a client that is not ours finds it
    model_folder: Path

    def ready(self) -> None:
        """Waits until it answers; ServerFailedError, and the server is gone, if it never does."""

    def set_path(self, path: str) -> None:
        """From the next decode step on; only for a server with the plugin."""

    def flush(self) -> bool:
        """Empties the prefix cache; False when requests are still running (nothing was emptied)."""

    def snapshot_pool(self) -> None:
        """Lets the plugin keep a picture of the KV pool as `pool_before`."""

    def prime(self, prompt: Sequence[int]) -> None:
        """Puts this prompt into the prefix cache and waits for it."""

    def send(self, requests: Sequence[PromptSpec], how: SendPlan) -> tuple[RequestSample, ...]:
        """Sends a block and waits for all of it; a request that failed has `error`, it does not raise."""

    def counters(self) -> StepCounters | None:
        """Totals since the start of the server; None without the plugin."""

    def placement(self) -> PlacementTrace | None: ...

    def log_tail(self) -> str:
        """The end of the server's log, for records."""

    def stop(self) -> None:
        """Ends the server and everything it started; safe to call twice."""


class Engine(Protocol):
    """`resources` must not be shared while measuring (each gets a lock); `device_indices` are watched."""

    resources: tuple[str, ...]
    device_indices: tuple[int, ...] | None
    labels: tuple[str, ...]

    def check(self) -> None:
        """Raises one clear EngineError if this engine cannot run here."""

    def plugin_source(self) -> str:
        """Identifies the plugin's code: records of other code do not count as done."""

    def begin(self, plugin: bool, seed: int, log: Path) -> Server:
        """Starts a server that writes to `log`, and does not wait for it."""

    def start(self, plugin: bool, seed: int, log: Path) -> Server:
        """`begin` and `ready` in one."""


def start_all(
    engine: Engine, seed: int, logs: Mapping[bool, Path]
) -> tuple[dict[bool, Server], dict[bool, ServerFailedError]]:
    """Servers with and without the plugin (the keys), starting at the same time: those that answer, and why others do
    not. An interruption ends all of them."""
    servers: dict[bool, Server] = {}
    errors: dict[bool, ServerFailedError] = {}
    try:
        for plugin, log in logs.items():
            try:
                servers[plugin] = engine.begin(plugin, seed, log)
            except ServerFailedError as error:
                errors[plugin] = error
        for plugin, server in tuple(servers.items()):
            try:
                server.ready()
            except ServerFailedError as error:
                errors[plugin] = error
                del servers[plugin]
    except BaseException:
        for server in servers.values():
            server.stop()
        raise
    return servers, errors
