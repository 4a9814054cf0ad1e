"""SGLang's KV allocator, taught to keep free runs: most free pages wait in an index instead of in its flat list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from torch import Tensor

from prefixonce.errors import UnsupportedError
from prefixonce.layout import FreeRuns, Run

# The flat list is refilled by at least this much, so that decode steps seldom touch the index.
_REFILL_TOKENS = 256
# The flat list goes to the index again only after one page in this many of the pool was freed into it.
_REINDEX_DIVISOR = 16
# A run is worth evicting for if it is this many times the shortest one.
_RECLAIM_FACTOR = 8

# Evicts until so many consecutive pages are free, given which pages [pages + 1] are; False if it cannot be done.
MakeRoom = Callable[[int, NDArray[np.bool_]], bool]


class NewPages(NamedTuple):
    """What a request's new tokens open: `whole` pages that they fill, which will be a radix node, and then `rest`."""

    whole: int
    rest: int


class RunKeeper:
    """Stands in front of a stock allocator that scheduler and runner already hold, by replacing its methods.

    The stock list `free_pages` feeds ordinary allocations and receives all frees, as before; it lies on the device
    and the host does not know its content. The index knows where its pages are and refills the list when that runs
    short, from the high end of the pool. Both count as available, so SGLang's accounting sees one pool.

    A prefill takes runs of the index for its requests, so that their nodes lie where they were written.
    """

    def __init__(self, allocator: Any, min_run_tokens: int) -> None:
        if not isinstance(allocator, (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)):
            raise UnsupportedError(
                f"KV allocator {type(allocator).__name__} is not supported; allowed: token and paged allocators"
            )
        self._stock = allocator
        self._page_size: int = allocator.page_size
        self._pages: int = allocator.size // self._page_size
        self._min_run_pages = max(1, -(-min_run_tokens // self._page_size))
        self._index = FreeRuns(np.zeros(0, np.bool_))
        self._pages_freed = 0
        # Set by the tree, which knows what may be evicted.
        self.make_room: MakeRoom | None = None
        self._prefill_lens: Sequence[int] = ()
        self._stock_alloc, allocator.alloc = allocator.alloc, self._alloc
        self._stock_alloc_extend, allocator.alloc_extend = allocator.alloc_extend, self._alloc_extend
        self._stock_alloc_decode, allocator.alloc_decode = allocator.alloc_decode, self._alloc_decode
        self._stock_free, allocator.free = allocator.free, self._free
        self._stock_clear, allocator.clear = allocator.clear, self._clear
        self._stock_available, allocator.available_size = allocator.available_size, self._available_size
        self.reindex()

    @property
    def bulk_tokens(self) -> int:
        """What is worth evicting at once: freed together, it is worth looking for runs in it."""
        return self._pages // _REINDEX_DIVISOR * self._page_size

    @contextmanager
    def prefill(self, extend_lens: Sequence[int]) -> Iterator[None]:
        """What is allocated within is for requests with so many new tokens each. At page size 1 SGLang asks for their
        sum only, in the same words as for a decode step."""
        self._prefill_lens = extend_lens
        try:
            yield
        finally:
            self._prefill_lens = ()

    def take_run(self, tokens: int) -> int | None:
        """First slot of a free run of `tokens` (whole pages), now taken, or None if there is none.

        Waits for the device only when so much was freed since the flat list was last searched for runs that
        searching it again has been paid for, or when a long run is worth evicting for.
        """
        start = self._take_run(tokens // self._page_size)
        return None if start is None else start * self._page_size

    def _take_run(self, pages: int) -> int | None:
        start = self._index.take(pages)
        if start is None and self._pages_freed >= self._pages // _REINDEX_DIVISOR:
            self.reindex()
            start = self._index.take(pages)
        if start is None and self.make_room is not None and self._is_worth_evicting(pages):
            if self.make_room(pages, self._free_mask()):
                self.reindex()
            start = self._index.take(pages)
        return start

    def _is_worth_evicting(self, pages: int) -> bool:
        # While SGLang collects what it frees, nothing that is evicted becomes free.
        return pages >= _RECLAIM_FACTOR * self._min_run_pages and bool(self._stock.is_not_in_free_group)

    def free_slots(self) -> list[Run]:
        """All free slots as ascending runs; waits for the device."""
        size = self._page_size
        return [Run(run.start * size, run.length * size) for run in FreeRuns(self._free_mask())]

    @property
    def slots(self) -> Run:
        """The pool's usable slots; the page before them is reserved for padding."""
        return Run(self._page_size, self._pages * self._page_size)

    def _available_size(self) -> int:
        stock: int = self._stock_available()
        return stock + self._index.total * self._page_size

    def _alloc(self, need_size: int) -> Tensor | None:
        if self._page_size == 1 and sum(self._prefill_lens) == need_size:
            self._lay_out([NewPages(tokens, 0) for tokens in self._prefill_lens])
        self._refill(-(-need_size // self._page_size))
        slots: Tensor | None = self._stock_alloc(need_size)
        return slots

    def _alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | None:
        self._lay_out(_new_pages(prefix_lens_cpu.numpy(), seq_lens_cpu.numpy(), self._page_size))
        # Every request may open one page that its tokens do not fill.
        self._refill(extend_num_tokens // self._page_size + len(prefix_lens) + 1)
        slots: Tensor | None = self._stock_alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, *args, **kwargs
        )
        return slots

    def _alloc_decode(self, seq_lens: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        self._refill(len(seq_lens))
        slots: Tensor | None = self._stock_alloc_decode(seq_lens, *args, **kwargs)
        return slots

    def _free(self, free_index: Tensor) -> None:
        self._pages_freed += free_index.numel() // self._page_size
        self._stock_free(free_index)

    def _clear(self) -> None:
        self._stock_clear()
        self.reindex()

    def reindex(self) -> None:
        """Moves all free pages from the flat list into the index; waits for the device."""
        self._index = FreeRuns(self._free_mask())
        stock = self._stock
        stock.free_pages = stock.free_pages[:0]
        stock.release_pages = stock.release_pages[:0]
        self._pages_freed = 0

    def _free_mask(self) -> NDArray[np.bool_]:
        """Of every page; page 0 is reserved."""
        mask = np.zeros(self._pages + 1, np.bool_)
        mask[self._stock.free_pages.cpu().numpy()] = True
        mask[self._stock.release_pages.cpu().numpy()] = True
        self._index.mark(mask)
        return mask

    def _lay_out(self, requests: Sequence[NewPages]) -> None:
        """Moves the pages of a prefill to the head of the flat list, where the stock allocator takes them request by
        request: runs for those that will be nodes worth one, as far as there are runs, else what the list begins with.

        The device writes the runs' numbers itself: a copy from the host would wait.
        """
        starts = [self._take_run(new.whole) if new.whole >= self._min_run_pages else None for new in requests]
        if all(start is None for start in starts):
            return
        loose = [new.rest if start is not None else sum(new) for start, new in zip(starts, requests, strict=True)]
        self._refill(sum(loose))
        parts: list[Run | slice] = []  # slices are of the flat list
        at = 0
        for start, new, pages in zip(starts, requests, loose, strict=True):
            if start is not None:
                last = parts[-1] if parts else None
                if isinstance(last, Run) and last.end == start:  # as most are in a pool that is not fragmented
                    parts[-1] = Run(last.start, last.length + new.whole)
                else:
                    parts.append(Run(start, new.whole))
            if pages:
                parts.append(slice(at, at + pages))
                at += pages
        stock = self._stock
        head = [
            torch.arange(part.start, part.end, device=stock.device) if isinstance(part, Run) else stock.free_pages[part]
            for part in parts
        ]
        stock.free_pages = torch.cat((*head, stock.free_pages[at:]))

    def _refill(self, pages: int) -> None:
        missing = pages - len(self._stock.free_pages)
        if missing <= 0 or not self._index.total:
            return
        moved = torch.from_numpy(self._index.drain(max(missing, _REFILL_TOKENS // self._page_size)))
        self._stock.free_pages = torch.cat((self._stock.free_pages, moved.to(self._stock.device)))


def _new_pages(before: NDArray[np.int64], after: NDArray[np.int64], page_size: int) -> list[NewPages]:
    """`before`, `after` [requests]: how many tokens each has; the page that `before` ends in is not new."""
    old = -(-before // page_size)
    whole = np.maximum(after // page_size - old, 0)
    rest = -(-after // page_size) - old - whole
    return [NewPages(*new) for new in zip(whole.tolist(), rest.tolist(), strict=True)]
