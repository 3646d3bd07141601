"""The two entry points that stock sglang discovers: the CPU platform and the patches it needs.

They do nothing on a machine with CUDA. They also serve a stock `python -m sglang.launch_server` on a machine
without one, which is how outputs and speeds are compared with stock's.
"""

from __future__ import annotations


def has_cuda() -> bool:
    """True if torch sees a CUDA device. Asks NVML where it can, so that no CUDA context is made."""
    import torch

    return torch.cuda.device_count() > 0


def activate_platform() -> str | None:
    """Entry point `sglang.srt.platforms`: the class path of the CPU platform, or None where there is CUDA."""
    return None if has_cuda() else "sglang_adapt.upstream.cpu.platform.VirtualGpuPlatform"


def register_cpu_patches() -> None:
    """Entry point `sglang.srt.plugins`: apply what stock needs to run on a plain CPU."""
    if has_cuda():
        return
    from sglang_adapt.upstream.cpu.patches import CPU_PATCHES
    from sglang_adapt.upstream.patch import PATCHES

    PATCHES.apply(*CPU_PATCHES)
