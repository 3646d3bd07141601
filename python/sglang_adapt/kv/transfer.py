"""Moving one contiguous piece of memory with the copy engine, which takes no multiprocessor from running
work."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


class TransferError(RuntimeError):
    """The CUDA driver refused a copy; the text gives its error number and the sizes."""


def push(dest: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy of `source`'s bytes to `dest` on the current stream; between host tensors it is done on
    return.

    `dest` may be memory of a peer GPU mapped into this process, or pinned host memory. torch's own `copy_`
    would make a context on the peer, since the tensor says that it lies there; the driver goes by addresses.

    Args:
        dest, source: contiguous, of one size in bytes.

    Raises:
        ValueError: sizes that differ, or a tensor that is not contiguous.
        TransferError: from the driver.
    """
    if dest.nbytes != source.nbytes or not (dest.is_contiguous() and source.is_contiguous()):
        raise ValueError(
            f"cannot copy {source.nbytes} bytes to {dest.nbytes} bytes: both must be contiguous and of one size"
        )
    if dest.device.type == "cpu" and source.device.type == "cpu":
        dest.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))
        return
    code = _driver().cuMemcpyAsync(
        ctypes.c_uint64(dest.data_ptr()),
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_size_t(source.nbytes),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if code:
        raise TransferError(
            f"the CUDA driver refused to copy {source.nbytes} bytes from {source.device} to {dest.device} "
            f"(CUresult {code})"
        )


def pin(buffer: torch.Tensor) -> None:
    """Lock host memory, e.g. a mapped shared file, so that GPUs copy to and from it at full speed and without
    waiting. Undone when the process ends; unmapping the memory earlier needs `unpin` first.

    Raises:
        ValueError: not host memory.
        TransferError: from the CUDA runtime.
    """
    _require_host(buffer)
    _check(buffer, torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0), "lock")


def unpin(buffer: torch.Tensor) -> None:
    """Undo `pin`. Raises as it does."""
    _require_host(buffer)
    _check(buffer, torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()), "unlock")


def _require_host(buffer: torch.Tensor) -> None:
    if buffer.device.type != "cpu":
        raise ValueError(f"only host memory can be pinned, not memory of {buffer.device}")


def _check(buffer: torch.Tensor, code: Any, verb: str) -> None:
    if int(code):
        raise TransferError(f"CUDA refused to {verb} {buffer.nbytes} bytes of host memory ({code})")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
