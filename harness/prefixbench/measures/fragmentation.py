"""How much of the shared prefixes stays contiguous under churn: SGLang's tree and allocators under our placement.

A stream of requests drives them in simulated time. There is no model and no K/V; slots are all that moves.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefixbench.measures.traffic import Arrival, Traffic, arrivals


@dataclass(frozen=True)
class Machine:
    """`step_s` is simulated time of one decode step; prefills take the steps that their chunks need."""

    pool_tokens: int = 262144
    page_size: int = 1
    min_run_tokens: int = 64
    step_s: float = 0.02
    max_running: int = 128
    chunk_tokens: int = 8192
    longest_request_tokens: int = 32768


class Sample(NamedTuple):
    """The pool at one time. Shared: in a node under at least two running requests; each token counts once."""

    at_s: float
    shared_tokens: int
    contiguous_tokens: int
    running: int
    free_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Fragmentation:
    samples: tuple[Sample, ...]
    nodes_placed: dict[str, int]
    """By layout and reason."""
    finished: int
    retracted: int
    hit_rate: float
    wall_s: float

    def contiguous_share(self, from_s: float = 0.0) -> float | None:
        """Of the shared prefix tokens, over all samples from `from_s` on; None when nothing was shared."""
        late = [sample for sample in self.samples if sample.at_s >= from_s]
        shared = sum(sample.shared_tokens for sample in late)
        return sum(sample.contiguous_tokens for sample in late) / shared if shared else None


def simulate(traffic: Traffic, machine: Machine, *, seconds: float, sample_s: float, seed: int) -> Fragmentation:
    """`seconds` of simulated time from an empty pool; deterministic but for `wall_s`."""
    server = _Server(machine)
    began_s = time.perf_counter()
    stream = arrivals(traffic, seed)
    upcoming = next(stream)
    samples = []
    for step in range(1, round(seconds / machine.step_s) + 1):
        now_s = step * machine.step_s
        while upcoming.at_s <= now_s:
            server.waiting.append(_Request(upcoming))
            upcoming = next(stream)
        server.step()
        if step % round(sample_s / machine.step_s) == 0:
            samples.append(server.sample(now_s))
    nodes = {f"{layout}: {reason}": count for (layout, reason), count in server.placement.nodes.items()}
    return Fragmentation(
        samples=tuple(samples),
        nodes_placed=nodes,
        finished=server.finished,
        retracted=server.retracted,
        hit_rate=server.cached_tokens / max(1, server.prompt_tokens),
        wall_s=time.perf_counter() - began_s,
    )


class _Request:
    """What SGLang's tree and pools read and write of a request. `computed` tokens have slots."""

    def __init__(self, arrival: Arrival) -> None:
        self.origin_input_ids = array("q", arrival.prompt.tobytes())
        self.output_ids = array("q")
        self.left_tokens = arrival.output_tokens
        self.extra_key = None
        self.priority = 0
        self.session = None
        self.req_pool_idx: int | None = None
        self.last_node: Any = None
        self.cache_protected_len = 0
        self.prefix_indices: Any = None
        self.computed = 0

    def get_fill_ids(self) -> array[int]:
        return (self.origin_input_ids + self.output_ids)[: self.computed]


class _Server:
    """The scheduler's part: prefills first, in chunks; one token per running request and step; evicts, retracts."""

    def __init__(self, machine: Machine) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from prefixonce.plugin.placement import Placement
        from prefixonce.plugin.sglang_0516.allocator import RunKeeper
        from prefixonce.plugin.sglang_0516.tree import KvPool, PlacingRadixCache
        from prefixonce_cpu.allocator import build_allocator

        nothing: Any = SimpleNamespace(k_buffer=[], v_buffer=[])
        self._machine = machine
        self._allocator: Any = build_allocator(
            machine.pool_tokens,
            page_size=machine.page_size,
            dtype=torch.float32,
            device="cpu",
            kvcache=nothing,
            need_sort=False,
        )
        self._rows = ReqToTokenPool(machine.max_running, machine.longest_request_tokens, "cpu", False)
        self._keeper = RunKeeper(self._allocator, machine.min_run_tokens)
        pool = KvPool(self._allocator, self._keeper, nothing, None)
        self.placement = Placement(pool, machine.min_run_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._allocator,
            page_size=machine.page_size,
        )
        self._tree = PlacingRadixCache(params, pool, self.placement)
        self.waiting: deque[_Request] = deque()
        self._prefilling: _Request | None = None
        self._running: list[_Request] = []
        self.finished = self.retracted = 0
        self.prompt_tokens = self.cached_tokens = 0

    def step(self) -> None:
        batch = list(self._next_chunks())
        if batch:
            self._prefill(batch)
        elif self._running:
            self._decode()

    def sample(self, now_s: float) -> Sample:
        shared = contiguous = 0
        nodes = list(self._tree.root_node.children.values())
        while nodes:
            node = nodes.pop()
            if node.lock_ref < 2:
                continue
            nodes.extend(node.children.values())
            shared += len(node.key)
            if self.placement.start_of(node.id) is not None:
                contiguous += len(node.key)
        free, tree = self._allocator.available_size(), self._tree
        cached = tree.evictable_size() + tree.protected_size()
        return Sample(now_s, shared, contiguous, len(self._running), free, cached)

    def _next_chunks(self) -> Iterator[tuple[_Request, int]]:
        """Requests and how far each is computed in this step."""
        budget = self._machine.chunk_tokens
        while budget > 0 and (request := self._prefilling or self._admit(budget)) is not None:
            self._prefilling = None
            want = min(len(request.origin_input_ids), request.computed + budget)
            budget -= want - request.computed
            if want < len(request.origin_input_ids):
                self._prefilling = request
            yield request, want
            if self._prefilling is not None:
                return

    def _admit(self, budget: int) -> _Request | None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if not self.waiting or not self._rows.available_size():
            return None
        request = self.waiting[0]
        prompt = request.origin_input_ids
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], None)))
        have = len(match.device_indices)
        self._tree.inc_lock_ref(match.last_device_node)
        # As SGLang does: whoever runs may still need room, and so does this one's output.
        promised = sum(running.left_tokens for running in self._running) // 2
        room = self._allocator.available_size() + self._tree.evictable_size()
        if len(prompt) - have + request.left_tokens + promised + budget > room:
            self._tree.dec_lock_ref(match.last_device_node)
            return None
        self.waiting.popleft()
        request.last_node = match.last_device_node
        request.cache_protected_len = request.computed = have
        self._rows.alloc([request])
        self._rows.write((request.req_pool_idx, slice(0, have)), match.device_indices.to(torch.int32))
        self.prompt_tokens += len(prompt)
        self.cached_tokens += have
        return request

    def _prefill(self, batch: list[tuple[_Request, int]]) -> None:
        slots = self._slots_for([(request, request.computed, want) for request, want in batch])
        assert slots is not None, "admission left too little room"
        for (request, want), part in zip(
            batch, torch.split(slots, [want - r.computed for r, want in batch]), strict=True
        ):
            self._rows.write((request.req_pool_idx, slice(request.computed, want)), part.to(torch.int32))
            request.computed = want
            is_chunk = request is self._prefilling
            self._tree.cache_unfinished_req(request, chunked=is_chunk)
            if not is_chunk:
                request.output_ids.append(-1)
                self._running.append(request)

    def _decode(self) -> None:
        while (slots := self._slots_for([(r, r.computed, r.computed + 1) for r in self._running], decode=True)) is None:
            self._retract(self._running.pop())
        rows = torch.tensor([request.req_pool_idx for request in self._running])
        lengths = torch.tensor([request.computed for request in self._running])
        self._rows.write((rows, lengths), slots.to(torch.int32))
        still = []
        for request in self._running:
            request.computed += 1
            request.output_ids.append(-1)
            request.left_tokens -= 1
            if request.left_tokens > 0:
                still.append(request)
            else:
                self._tree.cache_finished_req(request, kv_len_to_handle=request.computed)
                self._rows.free(request)
                self.finished += 1
        self._running = still

    def _retract(self, request: _Request) -> None:
        """Its own slots are freed, and it starts over."""
        self._tree.cache_finished_req(request, is_insert=False, kv_len_to_handle=request.computed)
        self._rows.free(request)
        request.output_ids = array("q")
        request.last_node = None
        request.computed = 0
        self.waiting.appendleft(request)
        self.retracted += 1

    def _slots_for(self, parts: list[tuple[_Request, int, int]], *, decode: bool = False) -> Tensor | None:
        """Slots for the tokens [have, want) of each request, one after the other."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tokens = sum(want - have for _, have, want in parts)
        # SGLang's own estimate: any request may open a page.
        need = tokens + (len(parts) * self._machine.page_size if self._machine.page_size > 1 else 0)
        if self._allocator.available_size() < need:
            self._tree.evict(EvictParams(num_tokens=need))
        if self._allocator.available_size() < need:
            return None
        slots: Tensor | None
        if self._machine.page_size == 1:
            with self._keeper.prefill(() if decode else [want - have for _, have, want in parts]):
                slots = self._allocator.alloc(tokens)
        else:
            rows = torch.tensor([request.req_pool_idx for request, _, _ in parts])
            have, want = torch.tensor([p[1] for p in parts]), torch.tensor([p[2] for p in parts])
            last = torch.where(have > 0, self._rows.req_to_token[rows, have - 1], -1)
            if decode:
                slots = self._allocator.alloc_decode(want, want, last)
            else:
                slots = self._allocator.alloc_extend(have, have, want, want, last, tokens)
        return slots
