"""The paged KV allocator without its Triton kernels (stock's run on GPUs only)."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Stock's paged allocator with `alloc_extend` and `alloc_decode` in plain torch.

    Same arguments, results (int64 slot ids, or None when pages run out) and page order as the stock class in
    sglang/srt/mem_cache/allocator/paged.py.
    """

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
        size = self.page_size
        if self.need_sort and extend_num_tokens // size + len(prefix_lens) + 1 > len(self.free_pages):
            self.merge_and_sort_free()
        pages = int(((seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size).sum())
        if pages > len(self.free_pages):
            return None
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, size, self.device)
        self.free_pages = self.free_pages[pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        size = self.page_size
        if self.need_sort and len(seq_lens) > len(self.free_pages):
            self.merge_and_sort_free()
        opens_page = (seq_lens - 1) % size == 0
        pages = int(opens_page.sum())
        if pages > len(self.free_pages):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[opens_page] = self.free_pages[:pages] * size
        self.free_pages = self.free_pages[pages:]
        return slots
