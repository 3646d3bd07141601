"""What stock sglang needs changed to run on a plain CPU, a patch each."""

from __future__ import annotations

import inspect
from typing import Any

from sglang_adapt.upstream.patch import Patch

_GPU_COMMUNICATORS = (
    "use_pynccl",
    "use_pymscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
    "use_hpu_communicator",
    "use_xpu_communicator",
    "use_npu_communicator",
)


class NoGpuCommunicators(Patch):
    """Turns the device communicators of a process group off: PyNccl loads without a GPU and then dies."""

    target = "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__"
    kind = "before"

    @staticmethod
    def hook(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        from sglang.srt.distributed.parallel_state import GroupCoordinator

        signature = inspect.signature(inspect.unwrap(GroupCoordinator.__init__))
        bound = signature.bind(self, *args, **kwargs)
        for name in _GPU_COMMUNICATORS:
            bound.arguments[name] = False
        return bound.args, bound.kwargs


class NoThreadBinding(Patch):
    """Replaces the NUMA thread binding, which asserts that there are as many NUMA nodes as ranks.

    Its result is read by sgl_kernel's CPU build alone, which is not used here.
    """

    target = "sglang.srt.utils.numa_utils.init_threads_binding"
    kind = "replace"

    @staticmethod
    def hook(*, tp_rank: int, tp_size: int) -> None:
        return None


class PageableTokenBitmask(Patch):
    """Allocates xgrammar's token bitmask in pageable memory; stock asks for pinned memory, which needs CUDA."""

    target = "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask"
    kind = "replace"

    @staticmethod
    def hook(vocab_size: int, batch_size: int) -> Any:
        import torch
        from xgrammar import get_bitmask_shape

        return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=torch.int32)


class CpuTokenBitmask(Patch):
    """Applies xgrammar's token bitmask with its CPU kernel, which takes float32 only; stock calls Triton's."""

    target = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
    kind = "replace"

    @staticmethod
    def hook(self: Any, logits: Any, vocab_mask: Any) -> None:
        import torch
        from xgrammar import apply_token_bitmask_inplace

        if logits.dtype == torch.float32:
            apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
            return
        masked = logits.float()
        apply_token_bitmask_inplace(masked, vocab_mask, backend="cpu")
        logits.copy_(masked)


CPU_PATCHES: tuple[type[Patch], ...] = (NoGpuCommunicators, NoThreadBinding, PageableTokenBitmask, CpuTokenBitmask)
