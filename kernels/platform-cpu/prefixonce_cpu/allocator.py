"""SGLang's KV allocators without Triton: the stock token allocator at page size 1, a torch paged one above."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """The stock paged allocator with its two Triton kernels replaced by torch; slots are int64."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._reserve(num_new_pages):
            return None
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc.to(torch.int64), self.free_pages, slots, self.page_size, self.device
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,  # noqa: ARG002  SGLang's signature
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> torch.Tensor | None:
        opens_page = seq_lens_cpu % self.page_size == 1
        num_new_pages = int(opens_page.sum())
        if not self._reserve(num_new_pages):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[opens_page] = self.free_pages[:num_new_pages] * self.page_size
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def _reserve(self, num_pages: int) -> bool:
        if self.need_sort and num_pages > len(self.free_pages):
            self.merge_and_sort_free()
        return bool(num_pages <= len(self.free_pages))


def build_allocator(
    size: int, *, page_size: int, dtype: torch.dtype, device: str, kvcache: KVCache, need_sort: bool
) -> BaseTokenToKVPoolAllocator:
    """Builds what CUDA would use at this page size, so that the free list is first-in first-out at page size 1."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
    return TorchPagedAllocator(
        size, page_size=page_size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort
    )
