"""Regions in host memory: anonymous files (memfd), opened by others through /proc/<owner>/fd."""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
import weakref

import torch

from sglang_adapt.memory.handles import HostHandle
from sglang_adapt.memory.region import Access, MemoryGoneError, Region, SharedMemoryError


class HostRegion(Region):
    """The owner's region: keeps the file open, so that others can attach, until it is closed."""

    def __init__(self, tensor: torch.Tensor, handle: HostHandle) -> None:
        super().__init__(tensor, handle, owned=True)
        self._close_file = weakref.finalize(self, os.close, handle.fd)

    def close(self) -> None:
        super().close()
        self._close_file()


def allocate_host(nbytes: int) -> HostRegion:
    """See `region.allocate`. Pages are taken from the machine as they are first written."""
    fd = os.memfd_create("sglang_adapt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A file that shrinks under a mapping kills its users with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        stat = os.fstat(fd)
        handle = HostHandle(os.getpid(), fd, stat.st_dev, stat.st_ino, nbytes)
        return HostRegion(_map(fd, nbytes, "write"), handle)
    except OSError as error:
        os.close(fd)
        raise SharedMemoryError(f"cannot allocate {nbytes} bytes of shared host memory: {error}") from error


def attach_host(handle: HostHandle, access: Access) -> Region:
    """See `region.attach`."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_CLOEXEC | (os.O_RDWR if access == "write" else os.O_RDONLY))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise MemoryGoneError(
            f"the shared memory of process {handle.pid} is gone ({path}: {error.strerror}); start its owner "
            f"again and attach to the new handle"
        ) from error
    except OSError as error:
        raise SharedMemoryError(
            f"cannot open the shared memory of process {handle.pid} ({path}): {error.strerror}; both "
            f"processes must run as one user and in one container"
        ) from error
    try:
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino, stat.st_size) != (handle.device, handle.inode, handle.nbytes):
            raise MemoryGoneError(
                f"{path} is not the shared memory that its handle describes: its owner, process "
                f"{handle.pid}, has closed it or is another process by now; attach to a new handle"
            )
        return Region(_map(fd, handle.nbytes, access), handle, owned=False)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int, access: Access) -> torch.Tensor:
    """Map a file and return it as uint8 [nbytes]; the mapping lives as long as the tensor's storage."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if access == "write" else 0)
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
    with warnings.catch_warnings():
        # torch warns of a buffer that must not be written; that is what "read" asks for.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
