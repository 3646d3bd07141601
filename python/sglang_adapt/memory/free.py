"""How much memory is free, on GPUs without making a CUDA context, and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CGROUP = Path("/sys/fs/cgroup")


class FreeMemoryError(RuntimeError):
    """The driver does not tell how much memory a GPU has free; the text names the GPU and the reason."""


@dataclass(frozen=True)
class FreeMemory:
    """What is free of one memory.

    Attributes:
        name: of the GPU model, or "host memory".
        free_bytes, total_bytes: now, and in all.
    """

    name: str
    free_bytes: int
    total_bytes: int


class GpuMemory:
    """Asks NVML about one GPU's memory.

    Args:
        index: of the CUDA device, in this process.
        uuid: of the device, as CUDA tells it, so that CUDA_VISIBLE_DEVICES does not matter.

    Raises:
        FreeMemoryError: there is no driver, or no such GPU.
    """

    def __init__(self, index: int, uuid: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._index = index
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            name = pynvml.nvmlDeviceGetName(self._handle)
        except pynvml.NVMLError as error:
            raise FreeMemoryError(f"NVML does not know GPU {index} ({uuid}): {error}") from None
        self._name: str = name if isinstance(name, str) else name.decode()

    def now(self) -> FreeMemory:
        """What is free now. Raises FreeMemoryError if the driver does not tell."""
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise FreeMemoryError(f"NVML does not tell the free memory of GPU {self._index}: {error}") from None
        return FreeMemory(self._name, int(info.free), int(info.total))


def gpu_memory(index: int) -> GpuMemory:
    """A CUDA device of this process, by its index. Raises FreeMemoryError."""
    import torch

    return GpuMemory(index, str(torch.cuda.get_device_properties(index).uuid))


def host_memory(cgroup: Path = _CGROUP) -> FreeMemory:
    """What this process may still use of the host's memory: what is available, or what its control group leaves.

    Args:
        cgroup: folder of the control group (version 2; of version 1, that which has `memory/`).
    """
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used, cache in (
        (cgroup / "memory.max", cgroup / "memory.current", "inactive_file"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not limit.exists() or (text := limit.read_text().strip()) == "max":
            continue
        statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
        # Pages of files that nobody uses are given up before the limit bites.
        in_use = int(used.read_text()) - int(statistics.get(cache, 0))
        free, total = min(free, max(0, int(text) - in_use)), min(total, int(text))
    return FreeMemory("host memory", free, total)
