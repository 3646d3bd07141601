"""The few calls of the CUDA driver that sharing memory needs, by ctypes.

Why not `torch.multiprocessing.reductions`: that counts references in files under /dev/shm, which stay when
the owner is killed; a handle of it serves one receiver only, so that a restarted process could not attach;
and its memory comes from torch's allocator, which the setting `expandable_segments` makes unfit for CUDA IPC.
The driver's own calls have none of this. Source: CUDA driver API, "Memory Management" and "Primary Context
Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_LIBRARY = "libcuda.so.1"
_LAZY_ENABLE_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_HANDLE_BYTES = 64


class CudaDriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        code: the CUresult.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed with {name} ({code})")
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class CudaDriver:
    """A process's view of libcuda. Device numbers are those of torch (both follow CUDA_VISIBLE_DEVICES)."""

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._lib: Any = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(
                f"the CUDA driver library {library} cannot be loaded ({error}); memory of a GPU needs it"
            ) from error
        self._lib.cuIpcOpenMemHandle_v2.argtypes = [
            ctypes.POINTER(ctypes.c_uint64),
            _IpcHandle,
            ctypes.c_uint,
        ]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate `nbytes` on a device, zeroed; returns the address."""
        pointer = ctypes.c_uint64()
        with self._on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
            self._call("cuCtxSynchronize")
        return pointer.value

    def free(self, device: int, pointer: int) -> None:
        with self._on(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, device: int, pointer: int) -> bytes:
        """The IPC handle of memory that `allocate` returned."""
        handle = _IpcHandle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle.reserved)

    def open(self, device: int, ipc: bytes) -> int:
        """Map another process's memory for use from `device`, with peer access if it lies on another one."""
        pointer = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(ipc)
        with self._on(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                handle,
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
        return pointer.value

    def close(self, device: int, pointer: int) -> None:
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make a device's primary context, the one that torch uses, current for a while."""
        self._call("cuCtxPushCurrent_v2", self._primary(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _primary(self, device: int) -> ctypes.c_void_p:
        """The primary context, retained once and for good: releasing the last reference frees all memory."""
        if device not in self._contexts:
            ordinal, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts[device] = context
        return self._contexts[device]

    def _call(self, name: str, *args: Any) -> None:
        function: Callable[..., int] = getattr(self._lib, name)
        code = function(*args)
        if code != 0:
            raise CudaDriverError(name, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) != 0 or text.value is None:
            return "an unknown error"
        return text.value.decode()


@cache
def driver() -> CudaDriver:
    """The driver of this process; must not be called before a fork that is to use CUDA."""
    return CudaDriver()
