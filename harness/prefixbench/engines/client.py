"""Streams a block of requests to SGLang's /generate over loopback and keeps the arrival of every chunk."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from prefixbench.engines.base import SendPlan
from prefixbench.engines.stream import StreamCounter
from prefixbench.record import RequestSample
from prefixbench.workloads import PromptSpec


class StalledError(Exception):
    """No request of the block got a chunk for too long."""


class HoldError(Exception):
    """The server would not be paused, or not be released again."""


def send_block(url: str, requests: Sequence[PromptSpec], how: SendPlan, stall_s: float) -> tuple[RequestSample, ...]:
    """Sends all requests and returns their samples in order; a request's own failure is in its sample.

    Bodies are encoded before the clock starts, so that the client's work does not share the timed window. When all may
    be in flight at once, the paused server takes them in first and then begins with all of them: long prompts would
    otherwise arrive more slowly than they are served, and the batch never be what it should. They count as sent then.
    """
    bodies = [_body(request, how.stream_interval) for request in requests]
    # A full collection walks everything imported, and meanwhile nothing is read and no arrival is dated.
    gc.disable()
    try:
        return asyncio.run(_Block(url, requests, bodies, how, stall_s).run())
    finally:
        gc.enable()


class _Block:
    def __init__(
        self, url: str, requests: Sequence[PromptSpec], bodies: Sequence[bytes], how: SendPlan, stall_s: float
    ) -> None:
        self._url = url
        self._requests = requests
        self._bodies = bodies
        self._how = how
        self._stall_s = stall_s
        self._start_s = self._progress_s = time.perf_counter()
        self._held = how.in_flight is not None and 1 < len(requests) <= how.in_flight
        self._not_taken_in = set(range(len(requests)))
        self._all_taken_in = asyncio.Event()

    async def run(self) -> tuple[RequestSample, ...]:
        slots = asyncio.Semaphore(self._how.in_flight or len(self._requests))
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            if self._held:
                await self._command(session, "pause_generation", {"mode": "in_place"})
            self._start_s = self._progress_s = time.perf_counter()
            jobs = [asyncio.create_task(self._one(session, slots, index)) for index in range(len(self._requests))]
            released = asyncio.create_task(self._release(session)) if self._held else None
            pending: set[asyncio.Task[RequestSample]] = set(jobs)
            while pending:
                _, pending = await asyncio.wait(pending, timeout=1.0)
                if released is not None and released.done():
                    released.result()
                silent_s = time.perf_counter() - self._progress_s
                if pending and silent_s > self._stall_s:
                    for job in pending:
                        job.cancel()
                    raise StalledError(f"no token for {silent_s:.0f} s while {len(pending)} requests were waiting")
            samples = tuple(job.result() for job in jobs)
            if released is None:
                return samples
            released_s = await released
            return tuple(replace(sample, sent_s=released_s) for sample in samples)

    async def _release(self, session: aiohttp.ClientSession) -> float:
        """Lets the server begin once it has every request; the time at which it was told so."""
        await self._all_taken_in.wait()
        released_s = self._now()
        await self._command(session, "continue_generation", {"torch_empty_cache": False})
        return released_s

    async def _command(self, session: aiohttp.ClientSession, name: str, body: Mapping[str, object]) -> None:
        try:
            async with session.post(f"{self._url}/{name}", json=body) as response:
                refusal = "" if response.status == 200 else f"HTTP {response.status}: {(await response.text())[:300]}"
        except (aiohttp.ClientError, OSError) as error:
            raise HoldError(f"/{name} was not answered: {type(error).__name__}: {error}") from None
        if refusal:
            raise HoldError(f"/{name} answered {refusal}")

    def _taken_in(self, index: int) -> None:
        """The server has read the request (it answers at once, long before the first token), or never will."""
        self._not_taken_in.discard(index)
        if not self._not_taken_in:
            self._all_taken_in.set()

    async def _one(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, index: int) -> RequestSample:
        request = self._requests[index]
        if self._how.in_flight is None:
            await asyncio.sleep(max(0.0, request.arrival_s - self._now()))
        async with slots:
            self._progress_s = time.perf_counter()
            # An open-loop request counts from when it should have been sent, or a slow server hides its own delay.
            sent_s = request.arrival_s if self._how.in_flight is None else self._now()
            counter = StreamCounter(sent_s, len(request.input_ids))
            try:
                async for payload in self._payloads(session, index):
                    counter.feed(payload, self._now())
            except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
                return counter.sample(f"{type(error).__name__}: {error}")
            finally:
                self._taken_in(index)
            return counter.sample()

    async def _payloads(self, session: aiohttp.ClientSession, index: int) -> AsyncIterator[dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{self._url}/generate", data=self._bodies[index], headers=headers) as response:
            self._taken_in(index)
            self._progress_s = time.perf_counter()
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            unread = b""
            async for received in response.content.iter_any():
                self._progress_s = time.perf_counter()
                *events, unread = (unread + received).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    payload = json.loads(data)
                    if not isinstance(payload, dict):
                        raise ValueError(f"an event is no object: {data[:100]!r}")  # noqa: TRY004 - not our own type
                    if "error" in payload:
                        raise ValueError(str(payload["error"]))
                    yield payload

    def _now(self) -> float:
        return round(time.perf_counter() - self._start_s, 6)  # microseconds: half of a record is such times


def _body(request: PromptSpec, stream_interval: int) -> bytes:
    sampling = {
        "temperature": 0,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": True,
        "stream_interval": stream_interval,
    }
    return json.dumps({"input_ids": request.input_ids, "sampling_params": sampling, "stream": True}).encode()
