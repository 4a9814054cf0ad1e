"""What one block keeps: token counts from the server (O27), no warm-up (O33), realized batch (O34), early ends (O31),
cache state (O32) and prompt length (O28)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from prefixbench.engines.base import SendPlan
from prefixbench.engines.client import HoldError, StalledError, send_block
from prefixbench.engines.stream import StreamCounter
from prefixbench.machine.telemetry import Sampler
from prefixbench.measures.base import Task
from prefixbench.measures.serving import (
    block_flags,
    expected_cached_tokens,
    load_flags,
    measure_block,
    realized_batch,
    subtract,
    warm_up,
)
from prefixbench.record import RequestSample, StepCounters, Telemetry, TelemetrySample
from prefixbench.workloads import PromptSpec, Workload
from record_factory import CASE

PREFIX = tuple(range(100, 164))


def _task(requests: int = 4, concurrency: int = 4, page_size: int = 1, output_tokens: int = 9) -> Task:
    prompts = tuple(PromptSpec((*PREFIX, 500 + i, 600 + i), output_tokens, prefix_id=0) for i in range(requests))
    case = replace(CASE, concurrency=concurrency, engine_settings={"page_size": page_size})
    return Task(case, Workload("w", prompts, (PREFIX,), {}), SendPlan(concurrency, 4), lambda: Sampler(None, feeds=()))


def _sample(task: Task, **changes: Any) -> RequestSample:
    sample = RequestSample(0.0, ((1, 0.1), (9, 0.9)), len(PREFIX) + 2, len(PREFIX), 9, "usage", "length")
    return replace(sample, **changes)


def _counters(**changes: Any) -> StepCounters:
    counted = StepCounters({"cascade": 8}, 32, 8, 512, 0, 1, {4: 8}, decode_s=0.8, reasons={"asked": 8})
    return replace(counted, **changes)


class TestStream:
    def feed(self, *payloads: dict[str, Any]) -> RequestSample:
        counter = StreamCounter(0.0, 10)
        for at, payload in enumerate(payloads):
            counter.feed(payload, float(at))
        return counter.sample()

    def test_chunks_are_not_tokens(self) -> None:
        done = {"finish_reason": {"type": "length"}}
        sample = self.feed(
            {"output_ids": [7], "meta_info": {"completion_tokens": 1}},
            {"output_ids": [7], "meta_info": {"completion_tokens": 1}},
            {"output_ids": [7, 8, 9], "meta_info": {"completion_tokens": 3, "cached_tokens": 4, **done}},
        )
        assert (sample.output_tokens, sample.token_source) == (3, "usage")
        assert sample.chunks == ((1, 0.0), (3, 2.0)), "an empty chunk is no token"
        assert (sample.cached_tokens, sample.finish_reason, sample.error) == (4, "length", None)

    @pytest.mark.parametrize("second", [[7, 8, 9], [8, 9]])
    def test_ids_are_counted_whether_cumulative_or_not(self, second: list[int]) -> None:
        sample = self.feed({"output_ids": [7]}, {"output_ids": second})
        assert (sample.output_tokens, sample.token_source) == (3, "ids")

    def test_text_alone_is_an_estimate(self) -> None:
        sample = self.feed({"text": "a"}, {"text": ""}, {"text": "b"})
        assert (sample.output_tokens, sample.token_source) == (2, "estimated")

    def test_an_answer_cut_short_is_an_error(self) -> None:
        assert self.feed({"meta_info": {"completion_tokens": 1}}).error == "the answer ended without a finish reason"
        aborted = self.feed({"meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort"}}})
        assert aborted.error == "the server aborted the request"


class TestFlags:
    def test_a_block_as_asked_has_none(self) -> None:
        task = _task()
        assert block_flags(task, [_sample(task)] * 4, _counters()) == []
        assert block_flags(task, [_sample(task)] * 4, None) == []

    def test_realized_batch_below_the_one_asked(self) -> None:
        """64 asked, 32 allowed to run: most steps have 32, whatever the ends look like."""
        task = _task(64, 64)
        samples = [_sample(task)] * 64
        assert "batch-below-concurrency" in block_flags(task, samples, _counters(batch_histogram={32: 200, 64: 3}))
        assert block_flags(task, samples, _counters(batch_histogram={64: 200, 32: 3})) == []

    def test_without_the_plugin_overlap_of_decoding_shows_it(self) -> None:
        task = _task(4, 4)
        early = _sample(task, chunks=((1, 0.1), (9, 0.5)))
        late = _sample(task, chunks=((1, 0.6), (9, 0.9)))
        assert realized_batch([early, early, late, late], None) == 2
        assert "batch-below-concurrency" in block_flags(task, [early, early, late, late], None)

    def test_a_batch_that_outgrows_the_graphs_is_noted(self) -> None:
        task = _task()
        for ceiling, flags in ((2, ["above-graph-ceiling"]), (4, []), (0, [])):
            case = replace(task.case, engine_settings={"page_size": 1, "cuda_graph_max_bs": ceiling})
            assert block_flags(replace(task, case=case), [_sample(task)] * 4, _counters()) == flags

    def test_work_of_others_is_noted(self) -> None:
        def watched(*loads: float | None) -> tuple[Telemetry, ...]:
            samples = tuple(TelemetrySample(0.1, load_other=load) for load in loads)
            return (Telemetry("cpu", 0.1, None, samples),)

        assert load_flags(watched(None, 1.2, 0.8)) == ["other-load: 1.0 CPUs were busy with other work"]
        assert load_flags(watched(None, 0.1, 0.2)) == []
        assert load_flags(watched(None)) == []

    def test_one_output_token_decodes_nothing_and_is_not_flagged(self) -> None:
        task = _task(output_tokens=1)
        sample = _sample(task, chunks=((1, 0.1),), output_tokens=1)
        assert realized_batch([sample] * 4, _counters(batch_histogram={})) is None
        assert block_flags(task, [sample] * 4, _counters(batch_histogram={})) == []

    @pytest.mark.parametrize(
        ("changes", "flag"),
        [
            ({"cached_tokens": 63}, "cold-cache"),
            ({"cached_tokens": None}, "cold-cache"),
            ({"output_tokens": 8, "finish_reason": "stop"}, "early-stop"),
            ({"prompt_tokens": 67}, "prompt-length-differs"),
            ({"error": "reset"}, "failed-requests"),
        ],
    )
    def test_one_bad_request_flags_the_block(self, changes: dict[str, Any], flag: str) -> None:
        task = _task()
        assert block_flags(task, [*[_sample(task)] * 3, _sample(task, **changes)], _counters()) == [flag]

    @pytest.mark.parametrize(
        ("page_size", "prompt", "expected"), [(1, 66, 64), (16, 66, 64), (16, 60, 48), (1, 64, 63)]
    )
    def test_whole_pages_are_cached_and_never_the_last_token(self, page_size: int, prompt: int, expected: int) -> None:
        ids = (*PREFIX, 1, 2)[:prompt]
        primer = PREFIX[: min(prompt, 64)]
        assert expected_cached_tokens(PromptSpec(ids, 1), (primer, (5,)), page_size) == expected
        assert expected_cached_tokens(PromptSpec((9, 9), 1), (primer,), page_size) == 0


class ScriptedServer:
    """Counts what is asked of it; `busy` flushes fail that often first."""

    startup_s, command = 1.0, ("scripted",)

    def __init__(self, task: Task, busy: int = 0) -> None:
        self.calls: list[str] = []
        self.task = task
        self.busy = busy
        self.sent = 0

    def set_path(self, path: str) -> None:
        self.calls.append(f"path {path}")

    def flush(self) -> bool:
        self.busy -= 1
        self.calls.append("flush")
        return self.busy < 0

    def snapshot_pool(self) -> None:
        self.calls.append("snapshot")

    def prime(self, prompt: Any) -> None:
        self.calls.append(f"prime {len(prompt)}")

    def send(self, requests: Any, how: SendPlan) -> tuple[RequestSample, ...]:
        self.calls.append(f"send {requests[0].max_new_tokens}")
        self.sent += 1
        return (_sample(self.task),) * len(requests)

    def counters(self) -> StepCounters:
        self.calls.append("counters")
        return _counters(batch_histogram={4: 8 * self.sent}, decode_tokens=32 * self.sent, reasons={"asked": self.sent})

    def placement(self) -> None: ...
    def log_tail(self) -> str:
        return ""

    def stop(self) -> None: ...


def test_a_block_is_flushed_primed_and_counted_alone() -> None:
    task = _task()
    server = ScriptedServer(task)
    warm_up(server, task, 4)
    block = measure_block(server, task, 7)
    prepared = ["path cascade", "flush", "snapshot", "prime 64"]
    assert server.calls == [*prepared, "send 4", *prepared, "counters", "send 9", "counters"]
    assert block.counters is not None
    assert (block.counters.decode_tokens, block.counters.batch_histogram) == (32, {4: 8}), "the warm-up is not in it"
    assert (block.position, block.flags) == (7, ())
    assert block.cache_state == "flushed, primed 1 prefixes of 64 tokens, hit rate 0.9697"


def test_requests_still_running_before_a_block_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixbench.measures.serving._IDLE_WAIT_S", 0.0)
    task = _task()
    assert measure_block(ScriptedServer(task, busy=9), task, 0).flags == ("warmup-overlap",)
    assert measure_block(ScriptedServer(task, busy=0), task, 0).flags == ()


def test_subtract_keeps_what_could_not_be_observed_unknown() -> None:
    after = _counters(decode_s=1.5, steps={"cascade": 8, "stock": 2}, attention_s=None, prefix_s=0.5)
    counted = subtract(after, _counters(decode_s=0.5, reasons=None))
    assert counted.steps == {"stock": 2}
    assert (counted.decode_s, counted.attention_s, counted.prefix_s) == (1.0, None, 0.5)
    assert counted.reasons == {"asked": 8}


class _Sse(BaseHTTPRequestHandler):
    """SGLang's stream, one event split over two writes; `behaviour` is set by the test."""

    behaviour = "good"
    calls: ClassVar[list[str]] = []
    running = threading.Event()
    over = threading.Event()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.calls.append(self.path)
            (_Sse.running.clear if self.path == "/pause_generation" else _Sse.running.set)()
            self.send_response(500 if self.behaviour == "no-pause" else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.calls.append(self.path)
        if self.behaviour == "refuse":
            self.send_error(400, "too long")
            return
        self.send_response(200)
        self.end_headers()
        _Sse.running.wait(60.0)
        prompt = len(request["input_ids"])
        meta = {"prompt_tokens": prompt, "cached_tokens": prompt - 1}
        self._event({"output_ids": [1], "meta_info": {**meta, "completion_tokens": 1, "finish_reason": None}})
        if self.behaviour == "stall":
            _Sse.over.wait(60.0)
        if self.behaviour == "good":
            done = {**meta, "completion_tokens": 3, "finish_reason": {"type": "length"}}
            self._event({"output_ids": [1, 2, 3], "meta_info": done})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, payload: dict[str, Any]) -> None:
        text = f"data: {json.dumps(payload)}\n\n".encode()
        self.wfile.write(text[:9])
        self.wfile.flush()
        self.wfile.write(text[9:])

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    _Sse.calls.clear()
    _Sse.running.set()
    _Sse.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        _Sse.over.set()
        server.shutdown()


class TestClient:
    requests = tuple(PromptSpec(tuple(range(10 + i)), 3) for i in range(3))

    def send(
        self, monkeypatch: pytest.MonkeyPatch, url: str, behaviour: str, how: SendPlan
    ) -> tuple[RequestSample, ...]:
        monkeypatch.setattr(_Sse, "behaviour", behaviour)
        return send_block(url, self.requests, how, stall_s=0.5 if behaviour == "stall" else 60.0)

    def test_streams_are_read_in_request_order(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        samples = self.send(monkeypatch, url, "good", SendPlan(2, 8))
        assert [s.prompt_tokens for s in samples] == [10, 11, 12]
        assert all((s.output_tokens, s.token_source, s.error) == (3, "usage", None) for s in samples)
        assert all([count for count, _ in s.chunks] == [1, 3] for s in samples)
        assert all(s.sent_s < s.chunks[0][1] <= s.chunks[1][1] for s in samples)

    @pytest.mark.parametrize(("behaviour", "error"), [("refuse", "HTTP 400"), ("cut", "without a finish reason")])
    def test_a_bad_answer_is_the_requests_own_error(
        self, monkeypatch: pytest.MonkeyPatch, url: str, behaviour: str, error: str
    ) -> None:
        assert all(error in (s.error or "") for s in self.send(monkeypatch, url, behaviour, SendPlan(3, 8)))

    def test_silence_is_a_stall(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        with pytest.raises(StalledError, match="3 requests were waiting"):
            self.send(monkeypatch, url, "stall", SendPlan(3, 8))

    def test_a_batch_begins_when_the_server_has_all_of_it(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        samples = self.send(monkeypatch, url, "good", SendPlan(3, 8))
        assert _Sse.calls == ["/pause_generation", *["/generate"] * 3, "/continue_generation"]
        assert len({s.sent_s for s in samples}) == 1, "all count as sent when the server was let go"
        assert all(0 < s.sent_s < s.chunks[0][1] for s in samples)

    def test_a_queue_longer_than_the_batch_is_not_held(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self.send(monkeypatch, url, "good", SendPlan(2, 8))
        assert _Sse.calls == ["/generate"] * 3

    def test_a_server_that_cannot_be_held_is_an_error(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        with pytest.raises(HoldError, match="/pause_generation answered HTTP 500"):
            self.send(monkeypatch, url, "no-pause", SendPlan(3, 8))

    def test_open_loop_latency_counts_from_the_intended_time(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        monkeypatch.setattr(_Sse, "behaviour", "good")
        timed = tuple(replace(r, arrival_s=0.1 * i) for i, r in enumerate(self.requests))
        samples = send_block(url, timed, SendPlan(None, 8), stall_s=60.0)
        assert [s.sent_s for s in samples] == [0.0, 0.1, 0.2]
        assert all(s.chunks[0][1] >= s.sent_s for s in samples)
