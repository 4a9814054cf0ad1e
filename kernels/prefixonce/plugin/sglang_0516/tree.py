"""SGLang's radix cache, with the layout of a node decided when the node is created."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from torch import Tensor

from prefixonce.layout import Run
from prefixonce.plugin.grouping import Chain, Link, RunningRows
from prefixonce.plugin.picture import PoolRun, PrefixRun, draw
from prefixonce.plugin.placement import Placement
from prefixonce.plugin.sglang_0516.allocator import RunKeeper
from prefixonce.plugin.sglang_0516.newslots import NewSlots
from prefixonce.plugin.sglang_0516.reclaim import Reclaimer

_HALVINGS = 2  # a node lies in up to four runs, which is as many as the kernels read as such


class KvPool:
    """What placement needs of SGLang's pool: runs, frees, copies. `forward_stream` is None if forwards do not overlap
    with scheduling."""

    def __init__(
        self, allocator: Any, keeper: RunKeeper, kv_cache: MHATokenToKVPool, forward_stream: Any | None
    ) -> None:
        self._allocator = allocator
        self.keeper = keeper
        self._buffers = (*kv_cache.k_buffer, *kv_cache.v_buffer)
        self._forward_stream = forward_stream

    def take_run(self, tokens: int) -> int | None:
        return self.keeper.take_run(tokens)

    def free(self, slots: Tensor) -> None:
        self._allocator.free(slots)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """On CUDA this goes to the forward stream: the forward in flight may still write the source, and may write
        the target for a request that has finished meanwhile. Whoever reuses the old slots writes on that stream too.
        """
        if self._forward_stream is None:
            self._copy(source, target)
            return
        self._forward_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._forward_stream):
            self._copy(source, target)
        source.record_stream(self._forward_stream)
        target.record_stream(self._forward_stream)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        for buffer in self._buffers:
            buffer[target] = buffer[source]


class PlacingRadixCache(RadixCache):  # type: ignore[misc]
    def __init__(self, params: Any, pool: KvPool, placement: Placement) -> None:
        self._pool = pool
        self.placement = placement
        # A leaf inserted now holds prompt tokens if it begins before this depth.
        self._prompt_tokens = 0
        self._inserting: Any = None
        self.new_slots = NewSlots()
        self._paths: dict[int, Chain] = {}
        self.rows: RunningRows[Any] = RunningRows(self.chain_of)
        super().__init__(params)
        pool.keeper.make_room = Reclaimer(self).make_room

    def reset(self) -> None:
        super().reset()
        self._paths.clear()
        self.rows.clear()
        self.placement.flush()

    # While a request is cached nobody else refers to its new leaf yet, and its own row is rewritten (or released) by
    # the same call: the one moment at which K/V can move without anyone noticing.

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        with self._prompt(req, len(req.origin_input_ids) + len(req.output_ids)):
            super().cache_unfinished_req(req, chunked=chunked)
        self.rows.forget(req)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **options: Any) -> None:
        # Its prompt is new here only if it finished right after its prefill, as requests that warm a prefix do; a page
        # that its output has filled up is not.
        whole_pages = len(req.origin_input_ids) // self.page_size
        with self._prompt(req, whole_pages * self.page_size):
            super().cache_finished_req(req, is_insert, **options)
        self.rows.forget(req)

    @contextmanager
    def _prompt(self, request: Any, tokens: int) -> Iterator[None]:
        self._inserting, self._prompt_tokens = request, tokens
        try:
            yield
        finally:
            self._inserting, self._prompt_tokens = None, 0
            self.new_slots.forget(request)

    def _insert_helper(
        self, node: Any, key: Any, value: Tensor, priority: int = 0, chunked: bool = False
    ) -> tuple[int, Any]:
        matched, leaf = super()._insert_helper(node, key, value, priority, chunked)
        if matched < len(key):
            if matched < self._prompt_tokens:
                # Placing may evict, but nothing on the way to the leaf.
                self.inc_lock_ref(leaf)
                self._place(leaf, matched, _HALVINGS)
                self.dec_lock_ref(leaf)
            else:
                self.placement.leave(leaf.id, len(leaf.key))
        return matched, leaf

    def _place(self, leaf: Any, begin: int, halvings: int) -> None:
        """A run for the node, or else for each half of it: a prefix in a few runs is read as fast as one in one.
        `begin`: its first token in the request that is being cached."""
        half = len(leaf.key) // 2 // self.page_size * self.page_size
        can_split = halvings > 0 and self.placement.is_worth_a_run(half)
        known = self.new_slots.of(self._inserting, begin, begin + len(leaf.key))
        slots = self.placement.place(leaf.id, leaf.value, known, can_split=can_split)
        if slots is not None:
            leaf.value = slots
            return
        upper = self._split_node(leaf.key, leaf, half)
        self._place(upper, begin, halvings - 1)
        self._place(leaf, begin + half, halvings - 1)

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        self.placement.split(upper.id, len(upper.key), child.id, len(child.key))
        self._paths.clear()
        if upper.lock_ref > 0:
            self.rows.forget_where(lambda request: _is_above(child, request.last_node))
        return upper

    def evict(self, params: Any) -> Any:
        """More than is asked for, in SGLang's order: pages freed a few at a time would be neighbours of none."""
        keeper = self._pool.keeper
        result = super().evict(replace(params, num_tokens=params.num_tokens + keeper.bulk_tokens))
        if result.num_tokens_evicted:  # searching for runs waits for the device
            keeper.reindex()
        return result

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        self._paths.pop(node.id, None)
        self.placement.evict(node.id, len(node.key))

    def chain_of(self, request: Any) -> Chain:
        """The nodes above a running request, root first, as far as its row holds the tree's slots.

        Only two things change it: the request is cached again (it then has another last node), or a node in use is
        split. Creation adds below, eviction spares what is locked.
        """
        chain = self._path_to(request.last_node)
        while chain and chain[-1].end_tokens > request.cache_protected_len:
            chain = chain[:-1]
        return chain

    def _path_to(self, node: Any) -> Chain:
        """Kept by node: most requests come under a path that another one has."""
        unknown = []
        while node is not self.root_node and node.id not in self._paths:
            unknown.append(node)
            node = node.parent
        path = () if node is self.root_node else self._paths[node.id]
        for below in reversed(unknown):
            end_tokens = (path[-1].end_tokens if path else 0) + len(below.key)
            path = (*path, Link(below.id, end_tokens, self.placement.piece(below.id, below.value)))
            self._paths[below.id] = path
        return path

    @property
    def pool_slots(self) -> int:
        return self._pool.keeper.slots.length

    def picture(self) -> list[PoolRun]:
        """The pool's slots as they are now; waits for the device, so only on request."""
        prefixes = []
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            start = self.placement.start_of(node.id)
            if start is not None:
                prefixes.append(PrefixRun(Run(start, len(node.key)), node.id, node.lock_ref))
        keeper = self._pool.keeper
        return draw(keeper.slots, keeper.free_slots(), prefixes)


def _is_above(node: Any, below: Any) -> bool:
    """A node counts as above itself."""
    while below is not None and below is not node:
        below = below.parent
    return below is node
