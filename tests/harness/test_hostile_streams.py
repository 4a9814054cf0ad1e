"""A server that breaks its own protocol: the request has failed and says why, the others and the run go on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Sequence

import pytest
from aiohttp import web

from prefixbench.engines.base import SendPlan
from prefixbench.engines.client import HoldError, send_block
from prefixbench.engines.process import without_proxy
from prefixbench.record import RequestSample
from prefixbench.workloads import PromptSpec

DONE = b"data: [DONE]\n\n"
REQUESTS = [PromptSpec((1, 2, 3), 3)] * 2


def event(tokens: int, reason: object = None, **changes: object) -> bytes:
    meta = {"completion_tokens": tokens, "prompt_tokens": 3, "cached_tokens": 0, "finish_reason": reason} | changes
    return b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n"


LAST = event(3, {"type": "length"})


class HostileServer:
    """Answers every request with `stream`, and the calls that hold the server with `held`."""

    def __init__(self) -> None:
        self.stream: Sequence[bytes] = ()
        self.held = 200
        self._loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        for name in ("pause_generation", "continue_generation"):
            app.router.add_post(f"/{name}", self._hold)
        self._runner = web.AppRunner(app)
        self._loop.run_until_complete(self._runner.setup())
        self._loop.run_until_complete(web.TCPSite(self._runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in self.stream:
            await response.write(part)
        return response

    async def _hold(self, request: web.Request) -> web.Response:
        if self.held == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=self.held or 200)


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    hostile = HostileServer()
    yield hostile
    hostile.stop()


def send(server: HostileServer, *stream: bytes) -> RequestSample:
    server.stream, server.held = stream, 200
    first, second = send_block(server.url, REQUESTS, SendPlan(2, 1), 5.0)
    assert (first.error, first.output_tokens) == (second.error, second.output_tokens)
    return first


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ((event(1), event(1, {"type": "abort"}), DONE), "aborted"),
        ((event(1), event(2)), "without a finish reason"),
        ((event(1), event(2)[:20]), "without a finish reason"),
        ((), "without a finish reason"),
        ((event(1), b'data: {"error": {"message": "boom"}}\n\n'), "boom"),
        ((event(1), b"data: <html>\n\n"), "JSON"),
        ((event(1), b"data: [1]\n\n"), "no object"),
        ((event(1), b"data: null\n\n"), "no object"),
        ((event(1), b'data: "error"\n\n'), "no object"),
        ((event(1), b"data: " + b"[" * 100_000 + b"\n\n"), "recursion"),
        ((event(1), b'data: {"meta_info": [1]}\n\n'), "meta_info is [1]"),
        ((event(1), event(3, completion_tokens={}), DONE), "completion_tokens is {}"),
        ((event(1), event(3, completion_tokens=-5), DONE), "completion_tokens is -5"),
        ((event(1), event(3, completion_tokens=10**400), DONE), "completion_tokens is 1000"),
        ((event(1), event(3, {"type": "length"}, prompt_tokens="x"), DONE), "prompt_tokens is 'x'"),
        ((event(1), event(3, {"type": "length"}, cached_tokens=float("nan")), DONE), "cached_tokens is nan"),
    ],
)
def test_a_broken_answer_is_a_failed_request_that_keeps_what_had_come(
    server: HostileServer, stream: tuple[bytes, ...], error: str
) -> None:
    sample = send(server, *stream)
    assert sample.error is not None
    assert error in sample.error
    assert sample.output_tokens == (0 if not stream else 2 if event(2) in stream else 1)


@pytest.mark.parametrize(
    ("stream", "tokens"),
    [
        ((event(1), event(2), event(2), LAST, DONE), [1, 2, 3]),
        ((event(2), event(1), LAST, DONE), [2, 3]),
        ((event(1), event(2), event(2, {"type": "length"}), DONE), [1, 2]),
        ((event(3, {"reason": "other"}, prompt_tokens=None), DONE), [3]),
    ],
)
def test_repeated_reordered_and_missing_counts_never_add_tokens(
    server: HostileServer, stream: tuple[bytes, ...], tokens: list[int]
) -> None:
    sample = send(server, *stream)
    assert sample.error is None
    assert [count for count, _ in sample.chunks] == tokens
    assert (sample.output_tokens, sample.prompt_tokens) == (tokens[-1], 3)


def test_a_server_that_will_not_be_held_is_said_so(server: HostileServer) -> None:
    for held, said in ((0, "was not answered"), (500, "HTTP 500")):
        server.held = held
        with pytest.raises(HoldError, match=said):
            send_block(server.url, REQUESTS, SendPlan(2, 1), 5.0)


def test_a_proxy_of_the_environment_is_not_for_this_machine(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert send(server, LAST, DONE).error is None
    monkeypatch.setenv("NO_PROXY", "intern.example")
    assert without_proxy(os.environ)["no_proxy"] == "intern.example,127.0.0.1,localhost"
