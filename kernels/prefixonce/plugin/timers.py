"""Where the time of decode steps goes: by the host's clock, or by events on the device that nobody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol

import torch

from prefixonce.plugin.counters import Counters

Span = Literal["decode_s", "attention_s"]


class Timers(Protocol):
    def span(self, name: Span) -> AbstractContextManager[None]:
        """Times a decode forward, or the attention of one of its layers."""

    def settle(self) -> None:
        """Brings the counters up to date, and may wait for that: only when somebody asks for them."""


class NoTimers:
    _NOTHING: AbstractContextManager[None] = nullcontext()

    def span(self, _name: Span) -> AbstractContextManager[None]:
        return self._NOTHING

    def settle(self) -> None:
        """Nothing is ever outstanding."""


class HostTimers(NoTimers):
    """For a device whose work is over when a call returns. Attention is timed only with `details`."""

    def __init__(self, counters: Callable[[], Counters], *, details: bool) -> None:
        self._counters = counters
        self._details = details

    def span(self, name: Span) -> AbstractContextManager[None]:
        return self._timed(name) if self._details or name == "decode_s" else self._NOTHING

    @contextmanager
    def _timed(self, name: Span) -> Iterator[None]:
        began_s = perf_counter()
        yield
        self._counters().add_seconds(name, perf_counter() - began_s)


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class _Pair(NamedTuple):
    begin: Event
    end: Event


class _Flight(NamedTuple):
    pair: _Pair
    name: Span
    counters: Counters


class EventTimers:
    """A pair of events around each span, read once the device has passed them, some steps later.

    A decode forward is timed whole, in a graph or not. Attention is timed where its launches are made one by one: the
    events of a recorded graph would be recorded anew by the next replay, which is enqueued before this one is over. A
    step without such launches makes the attention of its counters partial, and a partial time is not reported.
    """

    def __init__(
        self, counters: Callable[[], Counters], make_event: Callable[[], Event], is_capturing: Callable[[], bool]
    ) -> None:
        self._counters = counters
        self._make_event = make_event
        self._is_capturing = is_capturing
        self._spare: list[_Pair] = []
        self._flying: deque[_Flight] = deque()
        self._has_attention = False

    @contextmanager
    def span(self, name: Span) -> Iterator[None]:
        if self._is_capturing():
            yield
            return
        if name == "decode_s":
            self._has_attention = False
        pair = self._spare.pop() if self._spare else _Pair(self._make_event(), self._make_event())
        pair.begin.record()
        yield
        pair.end.record()
        counters = self._counters()
        self._flying.append(_Flight(pair, name, counters))
        if name == "attention_s":
            self._has_attention = True
            return
        counters.attention_is_whole &= self._has_attention
        self._land()

    def settle(self) -> None:
        if self._flying:
            self._flying[-1].pair.end.synchronize()
        self._land()

    def _land(self) -> None:
        while self._flying and self._flying[0].pair.end.query():
            flight = self._flying.popleft()
            flight.counters.add_seconds(flight.name, 1e-3 * flight.pair.begin.elapsed_time(flight.pair.end))
            self._spare.append(flight.pair)


def timers_for(device_type: str, counters: Callable[[], Counters], *, details: bool) -> Timers:
    """`details` is PREFIXONCE_TIMERS; without it only a CPU's forwards are timed, which costs nothing there."""
    if device_type == "cpu":
        return HostTimers(counters, details=details)
    if not details:
        return NoTimers()

    def event() -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    return EventTimers(counters, event, torch.cuda.is_current_stream_capturing)
