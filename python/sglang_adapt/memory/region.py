"""Allocate a region, attach to one: the same two calls on GPUs and on virtual GPUs."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self

import torch

from sglang_adapt.memory.handles import CudaHandle, HostHandle, RegionHandle

Access = Literal["read", "write"]


class SharedMemoryError(RuntimeError):
    """A region cannot be allocated, exported or attached to."""


class MemoryGoneError(SharedMemoryError):
    """The process that owned a region is gone, and its memory with it."""


class Region:
    """Bytes that several processes see, in this process.

    Attributes:
        handle: names the memory to other processes.
        owned: True in the process that allocated it.
    """

    def __init__(self, tensor: torch.Tensor, handle: RegionHandle, owned: bool) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.handle = handle
        self.owned = owned

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, uint8 [nbytes], contiguous. Raises SharedMemoryError after `close`."""
        if self._tensor is None:
            raise SharedMemoryError(f"{self.handle} was closed in this process")
        return self._tensor

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    @property
    def closed(self) -> bool:
        return self._tensor is None

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if every element of `tensor` lies in this region."""
        start = self.tensor.data_ptr()
        first, last = byte_range(tensor)
        return start <= first and last <= start + self.nbytes

    def close(self) -> None:
        """Give up this process's reference; the memory is unmapped when no tensor over it is left."""
        self._tensor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte and the one after its last; strides must not be negative."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def allocate(nbytes: int, device: torch.device | str) -> Region:
    """Allocate zeroed memory that other processes can attach to.

    Args:
        nbytes: size, at least 1.
        device: "cpu", or "cuda:i".

    Raises:
        ValueError: a size or device that cannot be.
        SharedMemoryError: there is not enough memory; names the size and the device.
    """
    device = torch.device(device)
    if nbytes < 1:
        raise ValueError(f"a region of {nbytes} bytes was asked for; a region has at least one byte")
    if device.type == "cpu":
        from sglang_adapt.memory.host import allocate_host

        return allocate_host(nbytes)
    if device.type == "cuda":
        from sglang_adapt.memory.cuda import allocate_cuda

        return allocate_cuda(nbytes, device)
    raise ValueError(f"memory can be shared on cpu and cuda devices, not on {device}")


def attach(handle: RegionHandle, access: Access = "read", device: torch.device | str | None = None) -> Region:
    """Map a region that another process owns (on a CPU also one that this process owns).

    Args:
        handle: as the owner gave it.
        access: "read" makes a write to host memory end the writing process instead of spoiling the bytes for
            all; CUDA IPC cannot protect memory, there it is a statement of intent.
        device: on GPUs, the device from which the memory will be used, if that is another one than the memory
            lies on: it is mapped with peer access and without a second CUDA context. Default: where it lies.

    Raises:
        MemoryGoneError: the owner is gone.
        SharedMemoryError: the GPU is not visible here, or the driver refuses.
    """
    if isinstance(handle, HostHandle):
        from sglang_adapt.memory.host import attach_host

        return attach_host(handle, access)
    if isinstance(handle, CudaHandle):
        from sglang_adapt.memory.cuda import attach_cuda

        return attach_cuda(handle, None if device is None else torch.device(device))
    raise TypeError(f"not a region handle: {handle!r}")
