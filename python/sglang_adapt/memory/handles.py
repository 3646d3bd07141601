"""The messages by which a region of memory is named to another process."""

from __future__ import annotations

import msgspec


class HostHandle(msgspec.Struct, frozen=True, tag="host"):
    """An anonymous file of a living process.

    Attributes:
        pid: the owner.
        fd: the file's descriptor in the owner.
        device, inode: the file's identity, so that a reused pid or descriptor is noticed.
        nbytes: its size in bytes.
    """

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


class CudaHandle(msgspec.Struct, frozen=True, tag="cuda"):
    """Memory of one GPU, exported by CUDA IPC.

    Attributes:
        pid: the owner.
        gpu_uuid: the GPU, as `torch.cuda.get_device_properties(i).uuid` prints it; an index would mean
            another GPU in a process with another CUDA_VISIBLE_DEVICES.
        ipc: the driver's 64-byte CUipcMemHandle; one serves any number of processes.
        nbytes: the size in bytes.
    """

    pid: int
    gpu_uuid: str
    ipc: bytes
    nbytes: int


RegionHandle = HostHandle | CudaHandle
