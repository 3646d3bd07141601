"""Regions in GPU memory: driver memory, shared by CUDA IPC, found by the GPU's UUID."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import torch

from sglang_adapt.memory.driver import CudaDriverError, driver
from sglang_adapt.memory.handles import CudaHandle
from sglang_adapt.memory.region import MemoryGoneError, Region, SharedMemoryError

PAGE_BYTES = 2 << 20


def allocation_bytes(nbytes: int) -> int:
    """What is allocated for a region of `nbytes`: a multiple of the GPU's large pages.

    CUDA IPC maps an allocation of any other size with small pages, and matrix products then read it at two thirds
    (H100) or half (H200) of the speed: `benchmark/bench_memory.py`.
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class _Block:
    """A range of device memory as torch imports it; freed when the last tensor over it is gone.

    At the end of the process the driver takes everything back by itself.
    """

    def __init__(self, pointer: int, nbytes: int, release: Any, device: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
        finalizer = weakref.finalize(self, release, device, pointer)
        finalizer.atexit = False


def gpu_uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> int:
    """The index that a GPU has in this process.

    Raises:
        SharedMemoryError: the GPU is not visible here.
    """
    visible = [gpu_uuid(device) for device in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise SharedMemoryError(
            f"GPU {uuid} is not visible to process {os.getpid()} (visible: {', '.join(visible) or 'none'}); "
            f"give this process the same GPUs in CUDA_VISIBLE_DEVICES as the owner of the memory"
        )
    return visible.index(uuid)


def allocate_cuda(nbytes: int, device: torch.device) -> Region:
    """See `region.allocate`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.init()
    try:
        pointer = driver().allocate(index, allocation_bytes(nbytes))
        ipc = driver().export(index, pointer)
    except CudaDriverError as error:
        free, total = torch.cuda.mem_get_info(index)
        raise SharedMemoryError(
            f"cannot allocate {nbytes / 2**30:.2f} GiB of shared memory on cuda:{index} "
            f"({free / 2**30:.2f} of {total / 2**30:.2f} GiB are free): {error}"
        ) from error
    tensor = _import(_Block(pointer, nbytes, driver().free, index), pointer, index)
    return Region(tensor, CudaHandle(os.getpid(), gpu_uuid(index), ipc, nbytes), owned=True)


def attach_cuda(handle: CudaHandle, device: torch.device | None) -> Region:
    """See `region.attach`."""
    if handle.pid == os.getpid():
        raise SharedMemoryError(f"{handle} is this process's own memory; CUDA IPC opens only that of others")
    home = device_of(handle.gpu_uuid)
    index = home if device is None or device.index is None else device.index
    torch.cuda.init()
    try:
        pointer = driver().open(index, handle.ipc)
    except CudaDriverError as error:
        if not Path(f"/proc/{handle.pid}").exists():
            raise MemoryGoneError(
                f"the GPU memory of process {handle.pid} is gone, and so is the process; start it again and "
                f"attach to its new handle"
            ) from error
        raise SharedMemoryError(
            f"cannot map {handle.nbytes / 2**30:.2f} GiB of GPU {handle.gpu_uuid} (process {handle.pid}) "
            f"for use from cuda:{index}: {error}"
        ) from error
    block = _Block(pointer, handle.nbytes, driver().close, index)
    return Region(_import(block, pointer, home), handle, owned=False)


def _import(block: _Block, pointer: int, home: int) -> torch.Tensor:
    """A block as uint8 [nbytes] without a copy."""
    tensor = torch.as_tensor(block, dtype=torch.uint8)
    if tensor.data_ptr() != pointer:
        raise SharedMemoryError(f"torch copied the shared memory of cuda:{home} to {tensor.device}")
    return tensor
