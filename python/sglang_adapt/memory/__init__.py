"""Shared device memory: who owns it, who maps it, how it is released.

`allocate` makes a region that this process owns; its `handle` is a small message that any other process
of the machine turns into a mapping with `attach`, as often as it likes. On a GPU a region is plain driver
memory shared by CUDA IPC and found by the GPU's UUID; on a virtual GPU it is an anonymous file (memfd),
which has no name in /dev/shm and so cannot outlive its users, however they die.

Ownership: `close` gives up this process's reference. The memory behind it goes when the last tensor over it
is gone too, so a view never points to unmapped memory. On a GPU the owner must close last.

Out of scope: what the bytes mean.
"""

from sglang_adapt.memory.handles import CudaHandle, HostHandle, RegionHandle
from sglang_adapt.memory.region import Access, MemoryGoneError, Region, SharedMemoryError, allocate, attach

__all__ = [
    "Access",
    "CudaHandle",
    "HostHandle",
    "MemoryGoneError",
    "Region",
    "RegionHandle",
    "SharedMemoryError",
    "allocate",
    "attach",
]
