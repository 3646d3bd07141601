"""What is free of the host's memory and of a GPU's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_adapt.memory.free import FreeMemoryError, gpu_memory, host_memory

MB = 2**20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_limit_it_is_what_is_available(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max\n")
    found = host_memory(tmp_path)
    assert found.total_bytes == psutil.virtual_memory().total
    assert 0 < found.free_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("folder", "names", "cache"),
    [
        ("", ("memory__max", "memory__current"), "inactive_file"),
        ("memory", ("memory__limit_in_bytes", "memory__usage_in_bytes"), "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_a_control_groups_limit_counts_without_pages_of_unused_files(
    tmp_path: Path, folder: str, names: tuple[str, str], cache: str
) -> None:
    limit, used = names
    write(
        tmp_path / folder, **{limit: f"{64 * MB}\n", used: f"{40 * MB}\n"}, memory__stat=f"anon 1\n{cache} {8 * MB}\n"
    )
    found = host_memory(tmp_path)
    assert (found.free_bytes, found.total_bytes) == (32 * MB, 64 * MB)


@pytest.mark.gpu
def test_a_gpu_tells_without_a_cuda_context() -> None:
    found = gpu_memory(0).now()
    assert 0 < found.free_bytes <= found.total_bytes and found.name


def test_a_gpu_that_is_not_there_is_named() -> None:
    from sglang_adapt.memory.free import GpuMemory

    with pytest.raises(FreeMemoryError, match=r"NVML does not know GPU 7 \(00000000-"):
        GpuMemory(7, "00000000-0000-0000-0000-000000000000")
