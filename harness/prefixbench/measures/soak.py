"""Traffic of every kind at once on a running SGLang, in waves, with the cache emptied between them.

Random arrivals behind shared prefixes, streamed or not, some aborted, some hung up on.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Manner = Literal["stream", "whole", "abort", "hang-up"]
_MANNERS: tuple[tuple[Manner, float], ...] = (("stream", 0.55), ("whole", 0.25), ("abort", 0.1), ("hang-up", 0.1))
_WAVE_S = (2.0, 6.0)
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Prompt:
    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """Of the prompt with this index: the tokens that were chosen and their log-probabilities, as far as they came."""

    prompt: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    retractions: int


@dataclass
class Observed:
    answers: list[Answer] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Requests by manner."""
    aborted: int = 0
    flushes: int = 0
    errors: list[str] = field(default_factory=list)


def prompts(count: int, *, prefix_tokens: int, output_tokens: int, vocabulary: int, seed: int) -> tuple[Prompt, ...]:
    """Families of prompts that diverge at random depths, and some that share with nobody."""
    numbers = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [numbers.randrange(10, vocabulary) for _ in range(length)]

    bases = [tokens(numbers.randint(prefix_tokens // 4, prefix_tokens)) for _ in range(max(1, count // 8))]
    made = []
    for _ in range(count):
        base = numbers.choice(bases) if numbers.random() < 0.85 else []
        depth = len(base) if numbers.random() < 0.6 else numbers.randint(0, len(base))
        ids = base[:depth] + tokens(numbers.randint(1, max(2, prefix_tokens // 8)))
        made.append(Prompt(tuple(ids), numbers.randint(max(1, output_tokens // 4), output_tokens)))
    return tuple(made)


def ask_all(url: str, asked: Sequence[Prompt], in_flight: int) -> list[Answer]:
    """Every prompt once, so many at a time; an error is raised."""

    async def everything() -> list[Answer]:
        client = _Client(url, asked)
        slots = asyncio.Semaphore(in_flight)

        async def one(index: int) -> Answer:
            async with slots:
                return await client.whole(index)

        async with client:
            return await asyncio.gather(*map(one, range(len(asked))))

    return asyncio.run(everything())


def drive(
    url: str,
    asked: Sequence[Prompt],
    *,
    seconds: float,
    gap_s: float,
    in_flight: int,
    seed: int,
    between_waves: Callable[[], None],
) -> Observed:
    """Waves of requests for `seconds`; arrivals are `gap_s` apart in the mean, at most `in_flight` at once.

    `between_waves` is called while the server is idle and its cache just emptied. Stops at the first error.
    """
    observed = Observed()
    asyncio.run(_Driver(url, asked, gap_s, in_flight, random.Random(seed), observed).run(seconds, between_waves))
    return observed


class _Client:
    def __init__(self, url: str, asked: Sequence[Prompt]) -> None:
        self._url = url
        self._asked = asked

    async def __aenter__(self) -> _Client:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def whole(self, index: int) -> Answer:
        async with self._session.post(f"{self._url}/generate", json=self._body(index, stream=False)) as response:
            payload = await response.json(content_type=None)
        return _answer(index, payload)

    async def streamed(self, index: int, stop_after: int | None = None, rid: str | None = None) -> Answer | None:
        """The answer; None if `stop_after` tokens came first, after which the connection is closed."""
        payload: Any = {}
        body = self._body(index, stream=True) | ({} if rid is None else {"rid": rid})
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    payload = json.loads(data)
                    if stop_after is not None and payload.get("meta_info", {}).get("completion_tokens", 0) > stop_after:
                        return None
        return _answer(index, payload)

    async def abort(self, rid: str) -> None:
        async with self._session.post(f"{self._url}/abort_request", json={"rid": rid}) as response:
            await response.read()

    async def flush(self) -> bool:
        async with self._session.post(f"{self._url}/flush_cache") as response:
            await response.read()
            return response.status == 200

    def _body(self, index: int, *, stream: bool) -> dict[str, Any]:
        prompt = self._asked[index]
        sampling = {"temperature": 0, "max_new_tokens": prompt.max_new_tokens, "ignore_eos": True}
        return {
            "input_ids": prompt.input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }


class _AbortedError(Exception):
    """The server ended the request as it was told to."""


def _answer(index: int, payload: Any) -> Answer:
    """ValueError for anything but a whole answer."""
    meta = payload.get("meta_info")
    if meta is None:
        raise ValueError(f"no answer but {str(payload)[:300]}")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason == "abort":
        raise _AbortedError
    if reason != "length":
        raise ValueError(f"the request ended with {meta.get('finish_reason')}")
    chosen = meta["output_token_logprobs"]
    retractions = meta.get("num_retractions", 0)
    return Answer(index, tuple(entry[1] for entry in chosen), tuple(entry[0] for entry in chosen), retractions)


class _Driver:
    def __init__(
        self, url: str, asked: Sequence[Prompt], gap_s: float, in_flight: int, numbers: random.Random, seen: Observed
    ) -> None:
        self._client = _Client(url, asked)
        self._asked = asked
        self._gap_s = gap_s
        self._slots = asyncio.Semaphore(in_flight)
        self._random = numbers
        self._seen = seen

    async def run(self, seconds: float, between_waves: Callable[[], None]) -> None:
        end_s = time.monotonic() + seconds
        async with self._client:
            while time.monotonic() < end_s and not self._seen.errors:
                await self._wave(min(time.monotonic() + self._random.uniform(*_WAVE_S), end_s))
                if not self._seen.errors:
                    await self._flush()
                    await asyncio.to_thread(between_waves)

    async def _wave(self, end_s: float) -> None:
        jobs = []
        while time.monotonic() < end_s and not self._seen.errors:
            await asyncio.sleep(self._random.expovariate(1 / self._gap_s))
            (manner,) = self._random.choices(*zip(*_MANNERS, strict=True))
            jobs.append(asyncio.create_task(self._one(self._random.randrange(len(self._asked)), manner)))
        await asyncio.gather(*jobs)

    async def _one(self, index: int, manner: Manner) -> None:
        async with self._slots:
            self._seen.sent[manner] += 1
            try:
                answer = await self._ask(index, manner)
            except _AbortedError:
                self._seen.aborted += 1
                if manner != "abort":
                    self._seen.errors.append(f"the server aborted a request that nobody aborted (prompt {index})")
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                self._seen.errors.append(f"{manner}: {type(error).__name__}: {error}")
            else:
                if answer is not None:
                    self._seen.answers.append(answer)

    async def _ask(self, index: int, manner: Manner) -> Answer | None:
        if manner == "whole":
            return await self._client.whole(index)
        if manner == "stream":
            return await self._client.streamed(index)
        stop_after = self._random.randrange(self._asked[index].max_new_tokens)
        if manner == "hang-up":
            return await self._client.streamed(index, stop_after)
        rid = f"soak-{self._random.getrandbits(64):x}"
        answer = asyncio.create_task(self._client.streamed(index, rid=rid))
        await asyncio.sleep(self._random.expovariate(1 / self._gap_s))
        await self._client.abort(rid)
        return await answer

    async def _flush(self) -> None:
        """Works only on an idle server; who hung up is still being cleaned up after for a moment."""
        end_s = time.monotonic() + _PATIENCE_S
        while not await self._client.flush():
            if time.monotonic() > end_s:
                self._seen.errors.append(f"the server did not become idle in {_PATIENCE_S:.0f} s after a wave")
                return
            await asyncio.sleep(0.1)
        self._seen.flushes += 1
