"""SGLang's own radix cache, allocators and KV pool under our tree, without an engine: content and accounting.

Every slot's K/V carries a number made from the tokens up to it, so a slot that moved without its content, was given
away twice or was freed too early shows up wherever it is read.
"""

import types
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixonce.plugin.grouping import group_rows
from prefixonce.plugin.placement import Placement
from prefixonce.step import Segment

pytestmark = pytest.mark.engine

POOL_TOKENS = 480
MIN_RUN_TOKENS = 8
MAX_REQUESTS = 8


class Request:
    """What the tree reads and writes of a request."""

    def __init__(self, prompt):
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.extra_key = None
        self.priority = 0
        self.session = None
        self.req_pool_idx = None
        self.last_node = None
        self.cache_protected_len = 0
        self.prefix_indices = None
        self.filled = None  # tokens of a prompt that is prefilled in chunks

    def get_fill_ids(self):
        return (self.origin_input_ids + self.output_ids)[: self.filled]


class Server:
    """The scheduler's part: admits, prefills, decodes and finishes requests, writing numbered K/V into their slots."""

    def __init__(self, page_size, pool_tokens=POOL_TOKENS, min_run_tokens=MIN_RUN_TOKENS):
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from prefixonce.plugin.sglang_0516.allocator import RunKeeper
        from prefixonce.plugin.sglang_0516.tree import KvPool, PlacingRadixCache
        from prefixonce_cpu.allocator import build_allocator

        self.page_size = page_size
        slots = pool_tokens + page_size
        self.kv = types.SimpleNamespace(k_buffer=[torch.zeros(slots, 1, 1)], v_buffer=[torch.zeros(slots, 1, 1)])
        self.allocator = build_allocator(
            pool_tokens, page_size=page_size, dtype=torch.float32, device="cpu", kvcache=self.kv, need_sort=False
        )
        self.rows = ReqToTokenPool(MAX_REQUESTS, pool_tokens, "cpu", enable_memory_saver=False)
        self.keeper = RunKeeper(self.allocator, min_run_tokens)
        pool = KvPool(self.allocator, self.keeper, self.kv, None)
        self.placement = Placement(pool, min_run_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self.tree = PlacingRadixCache(params, pool, self.placement)
        self.running = []

    def scatter(self):
        """Half of the pool is in the flat list, where no two pages that are handed out together are neighbours."""
        pages = torch.from_numpy(self.keeper._index.drain(POOL_TOKENS // self.page_size // 2))
        self.allocator.free_pages = torch.cat((self.allocator.free_pages, pages.flip(0)))

    def find_no_runs_for_prefills(self):
        """As if the runs of the index had come free only since."""
        self.keeper._lay_out = lambda _requests: None

    def admit(self, prompt, *, finishes_at_once=False, chunk=None):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        request = Request(prompt)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt[:-1]), None)))
        request.last_node = match.last_device_node
        request.cache_protected_len = have = len(match.device_indices)
        self.tree.inc_lock_ref(request.last_node)
        if len(self.running) == MAX_REQUESTS or not self._make_room(len(prompt) - have + self.page_size):
            self.tree.dec_lock_ref(request.last_node)
            return None
        self.rows.alloc([request])
        self.rows.write((request.req_pool_idx, slice(0, have)), match.device_indices.to(torch.int32))
        for request.filled in (*range(have + chunk, len(prompt), chunk), None) if chunk else (None,):
            want = len(request.get_fill_ids())
            with self.keeper.prefill([want - have]):
                slots = self._append(request, have, want)
            self.tree.new_slots.launched([request], [have], [want - have], slots)
            if request.filled is not None:
                self.tree.cache_unfinished_req(request, chunked=True)
                have = want
        self.running.append(request)
        if finishes_at_once:
            self.finish(request)
        else:
            self.tree.cache_unfinished_req(request)
        return request

    def decode(self, request, token):
        have = len(request.get_fill_ids())
        if self._make_room(self.page_size):
            request.output_ids.append(token)
            self._append(request, have, have + 1)

    def finish(self, request):
        self.running.remove(request)
        self.tree.cache_finished_req(request, kv_len_to_handle=len(request.get_fill_ids()))
        self.rows.free(request)

    def _make_room(self, tokens):
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        short = tokens - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        return self.allocator.available_size() >= tokens

    def _append(self, request, have, want):
        row = request.req_pool_idx
        if self.page_size == 1:
            slots = self.allocator.alloc(want - have)
        else:
            before, after = torch.tensor([have]), torch.tensor([want])
            last = self.rows.req_to_token[row, have - 1 : have] if have else torch.tensor([-1])
            slots = self.allocator.alloc_extend(before, before, after, after, last, want - have)
        self.rows.write((row, slice(have, want)), slots.to(torch.int32))
        numbers = numbered(request.get_fill_ids())[have:want]
        self.kv.k_buffer[0][slots, 0, 0] = numbers
        self.kv.v_buffer[0][slots, 0, 0] = -numbers
        return slots

    def check(self):
        """Content of every row and node, single ownership of every slot, SGLang's leak equation."""
        owned = []
        stack = [(child, array("q")) for child in self.tree.root_node.children.values()]
        while stack:
            node, above = stack.pop()
            tokens = above + array("q", node.key.token_ids[: len(node.key)])
            expected = numbered(tokens)[len(above) :]
            assert torch.equal(self.kv.k_buffer[0][node.value, 0, 0], expected), f"node {node.id}"
            assert torch.equal(self.kv.v_buffer[0][node.value, 0, 0], -expected), f"node {node.id}"
            piece = self.placement.piece(node.id, node.value)
            if isinstance(piece, Segment):
                start = piece.start_slot
                assert node.value.tolist() == list(range(start, start + piece.length_tokens))
            owned += node.value.tolist()
            stack += [(child, tokens) for child in node.children.values()]
        for request in self.running:
            tokens = request.get_fill_ids()
            slots = self.rows.req_to_token[request.req_pool_idx, : len(tokens)].long()
            assert torch.equal(self.kv.k_buffer[0][slots, 0, 0], numbered(tokens))
            chain = self.tree.chain_of(request)
            assert (chain[-1].end_tokens if chain else 0) == request.cache_protected_len
            shared = [slot for link in chain for slot in piece_slots(link.piece)]
            assert shared == slots[: request.cache_protected_len].tolist()
            owned += slots[request.cache_protected_len :].tolist()
        assert len(set(owned)) == len(owned), "a slot has two owners"
        groups = group_rows([self.tree.chain_of(request) for request in self.running])
        assert described(self.tree.rows.groups_of(self.running)) == described(groups), "a chain was kept too long"
        free = {slot for run in self.keeper.free_slots() for slot in range(run.start, run.end)}
        assert not free & set(owned), "a slot in use is free"
        assert len(free) == self.allocator.available_size()
        if not self.running:
            known = len(free) + self.tree.evictable_size() + self.tree.protected_size()
            assert known == self.allocator.size // self.page_size * self.page_size, "slots leaked"


def described(groups):
    """Groups by their content; slots are compared as numbers."""
    return [
        (group.rows, group.prefix_tokens, [slot for piece in group.pieces for slot in piece_slots(piece)])
        for group in groups
    ]


def numbered(tokens):
    """A number per position that depends on every token up to it; exact in float32."""
    numbers, state = [], 7
    for token in tokens:
        state = (state * 31 + token + 1) % 16_000_057
        numbers.append(float(state))
    return torch.tensor(numbers)


def piece_slots(piece):
    if isinstance(piece, Segment):
        return range(piece.start_slot, piece.start_slot + piece.length_tokens)
    return piece.slots.tolist()


prompts = st.builds(
    lambda family, shared, tail: [family] * shared + [100 + token for token in tail],
    st.integers(1, 3),
    st.integers(1, 90),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
actions = st.one_of(
    st.tuples(st.just("admit"), prompts, st.tuples(st.booleans(), st.sampled_from((None, 7, 16)))),
    st.tuples(st.just("decode"), st.integers(1, 20), st.just(None)),
    st.tuples(st.just("finish"), st.integers(0, MAX_REQUESTS), st.just(None)),
)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("in_runs", [True, False], ids=["written into runs", "moved into runs"])
@settings(max_examples=40, deadline=None)
@given(schedule=st.lists(actions, min_size=1, max_size=25))
def test_no_schedule_mixes_up_slots(page_size, in_runs, schedule):
    server = Server(page_size)
    server.scatter()
    if not in_runs:
        server.find_no_runs_for_prefills()
    for action, argument, how in schedule:
        if action == "admit":
            server.admit(argument, finishes_at_once=how[0], chunk=how[1])
        elif action == "decode":
            for step in range(argument):
                for request in server.running:
                    server.decode(request, 200 + step % 3)
        elif server.running:
            server.finish(server.running[argument % len(server.running)])
        server.check()
    for request in list(server.running):
        server.finish(request)
    server.check()


@pytest.mark.parametrize(("page_size", "chunk"), [(1, None), (1, 24), (16, None), (16, 32)])
def test_a_prompt_is_written_into_a_run_and_stays_there(page_size, chunk):
    server = Server(page_size)
    server.scatter()
    request = server.admit([3] * 64, chunk=chunk)
    server.check()
    chain = server.tree.chain_of(request)
    assert server.placement.nodes == {("contiguous", "already contiguous"): len(chain)}
    assert all(isinstance(link.piece, Segment) for link in chain)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_scattered_prompt_moves_into_a_run_and_keeps_its_content(page_size):
    server = Server(page_size)
    server.scatter()
    server.find_no_runs_for_prefills()
    request = server.admit([3] * 48)
    server.check()
    assert server.placement.nodes["contiguous", "moved into a run"] == 1
    (link,) = server.tree.chain_of(request)
    assert isinstance(link.piece, Segment)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_output_of_a_finished_request_is_not_copied_into_a_run(page_size):
    """Its first page may hold the end of the prompt."""
    server = Server(page_size)
    server.scatter()
    server.find_no_runs_for_prefills()
    request = server.admit([3] * 40)
    for token in range(40):
        server.decode(request, 200 + token % 3)
    server.finish(request)
    server.check()
    assert server.placement.nodes == {
        ("contiguous", "moved into a run"): 1,
        ("paged", "output of a finished request"): 1,
    }


@pytest.mark.parametrize(("page_size", "chunk", "waits"), [(1, None, 0), (1, 20, 0), (16, 32, 0), (16, 24, 1)])
def test_the_device_is_waited_for_only_when_a_node_begins_before_the_last_chunk(page_size, chunk, waits):
    """In pages a chunk may end within a page, which the next one's node takes in."""
    server = Server(page_size)
    server.scatter()
    server.find_no_runs_for_prefills()
    server.admit([3] * 48, chunk=chunk)
    server.check()
    assert server.placement.device_waits == waits
    assert server.placement.nodes["contiguous", "moved into a run"] >= 1
    server.tree.new_slots.launched = lambda *_: None
    server.admit([4] * 48)
    server.check()
    assert server.placement.device_waits == waits + 1, "nobody said which slots the prefill wrote"


def test_a_prompt_stays_paged_when_no_run_is_free():
    server = Server(1)
    server.keeper._index.drain(POOL_TOKENS)
    server.allocator.free_pages = torch.cat((torch.arange(1, 481, 2), torch.arange(2, 481, 2)))
    request = server.admit([3] * 48)
    server.check()
    assert server.placement.nodes == {("paged", "no free run is long enough"): 4}, "a quarter finds none either"
    server.finish(request)
    server.check()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_long_prompt_evicts_what_lies_in_one_place(page_size):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    # The same pool, prompts and shortest run in pages, whatever the size of a page.
    server = Server(page_size, POOL_TOKENS * page_size, MIN_RUN_TOKENS * page_size)
    prompts = [[number] * 48 * page_size for number in range(1, 11)]
    for prompt in prompts[:-1]:
        server.finish(server.admit(prompt))
    running = server.admit(prompts[-1])
    for prompt in prompts[1::2]:
        server.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt), None)))
    # The least recently used are every second one: evicting them alone frees no two neighbours.
    request = server.admit([77] * 130 * page_size)
    server.check()
    pieces = [link.piece for link in server.tree.chain_of(request)]
    assert all(isinstance(piece, Segment) for piece in pieces), server.placement.nodes
    assert sum(piece.length_tokens for piece in pieces) == 130 * page_size
    assert len(pieces) <= 2
    assert server.placement.nodes == {("contiguous", "already contiguous"): 11}, "evicted before it was written"
    assert running.last_node.lock_ref == 1
    server.finish(running)
    server.finish(request)
    server.check()


def test_runs_come_back_when_enough_was_freed():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server = Server(1)
    server.keeper.make_room = None
    for number in range(7):
        assert server.admit([number] * 68) is not None
    for request in list(server.running):
        server.finish(request)
    server.tree.evict(EvictParams(num_tokens=POOL_TOKENS))
    assert server.keeper.take_run(400) is not None


def test_a_flush_forgets_every_run():
    server = Server(1)
    server.finish(server.admit([3] * 48))
    server.tree.reset()
    server.allocator.clear()
    server.check()
    assert server.allocator.available_size() == POOL_TOKENS
    assert server.placement.events[-1].kind == "flush"


def test_a_split_in_use_changes_only_the_groups_above_it(monkeypatch):
    server = Server(1)
    prompt, other = [3] * 48, [5] * 48
    rows = [server.admit(prompt), server.admit([*prompt, 1]), server.admit(other), server.admit([*other, 1])]
    before = server.tree.rows.groups_of(rows)
    assert [group.prefix_tokens for group in before] == [48, 48]
    assert server.tree.rows.groups_of(list(rows)) is before
    read = []
    chain_of = server.tree.rows._chain_of
    monkeypatch.setattr(server.tree.rows, "_chain_of", lambda request: read.append(request) or chain_of(request))
    server.admit([3] * 20 + [4] * 9)
    upper, lower = server.tree.rows.groups_of(rows)
    assert read == rows[:2]
    assert [piece.length_tokens for piece in upper.pieces] == [48], "two runs that touch are one"
    assert [link.end_tokens for link in server.tree.chain_of(rows[1])] == [20, 48, 49]
    assert lower.pieces is before[1].pieces
    rows[0].cache_protected_len = 47
    assert [link.end_tokens for link in server.tree.chain_of(rows[0])] == [20]
