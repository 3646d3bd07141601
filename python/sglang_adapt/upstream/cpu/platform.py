"""The out-of-tree platform that makes stock sglang run on a CPU without AMX and without sgl_kernel's CPU build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class VirtualGpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A platform of virtual GPUs: torch_native attention, MHA pool, torch allocator, no compilation."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int | None = None) -> str:
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        import torch

        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        if server_args.attention_backend is None:
            server_args.attention_backend = "torch_native"
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        server_args.disable_custom_all_reduce = True

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang_adapt.upstream.cpu.allocator import TorchPagedAllocator

        return TorchPagedAllocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"
