"""CUDA regions: shared between processes, found by UUID, flat over cycles."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from sglang_adapt.memory import CudaHandle, MemoryGoneError, SharedMemoryError, allocate, attach
from sglang_adapt.memory.allocator import refuse_expandable_segments
from sglang_adapt.memory.cuda import PAGE_BYTES, allocation_bytes
from sglang_adapt.memory.driver import CudaDriver

SPAWN = multiprocessing.get_context("spawn")
GIB = 1 << 30


def needs_gpus(count: int):
    """Mark a test of real GPUs; skip it where there are fewer."""

    def mark(test):
        skip = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
        return pytest.mark.gpu(skip(test))

    return mark


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"libnone\.so cannot be loaded .* needs it"):
        CudaDriver("libnone.so")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} sets expandable_segments:True"):
        refuse_expandable_segments({variable: "max_split_size_mb:64, expandable_segments:True"})
    refuse_expandable_segments({variable: "expandable_segments:False"})
    refuse_expandable_segments({})


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 16_060_522_496])
def test_allocations_are_whole_large_pages(nbytes: int) -> None:
    assert allocation_bytes(nbytes) % PAGE_BYTES == 0
    assert nbytes <= allocation_bytes(nbytes) < nbytes + PAGE_BYTES


def _own(pipe: Connection, device: int, nbytes: int) -> None:
    region = allocate(nbytes, f"cuda:{device}")
    region.tensor.fill_(5)
    torch.cuda.synchronize(device)
    pipe.send((region.handle, region.tensor.device.index))
    pipe.recv()


def _attach_with(pipe: Connection, visible: str, handle: CudaHandle) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        mapping = attach(handle)
        pipe.send((mapping.tensor.device.index, mapping.tensor.unique().tolist()))
    except SharedMemoryError as error:
        pipe.send(str(error))


@pytest.fixture
def own():
    """Start a process that owns a region on a device; returns it and its handle."""
    started = []

    def start(device: int, nbytes: int):
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=_own, args=(there, device, nbytes))
        process.start()
        there.close()
        started.append(process)
        handle, index = here.recv()
        assert index == device
        return process, handle

    yield start
    for process in started:
        process.kill()
        process.join()


@needs_gpus(1)
def test_a_region_is_shared_without_a_copy(own) -> None:
    _, handle = own(0, 64 << 20)
    with attach(handle) as mapping:
        assert mapping.tensor.is_cuda and mapping.tensor.unique().tolist() == [5]
        mapping.tensor[:4] = 6
        with attach(handle) as second:
            assert second.tensor[:5].tolist() == [6, 6, 6, 6, 5]


@needs_gpus(1)
def test_cycles_leave_gpu_memory_flat(own) -> None:
    _, handle = own(0, 64 << 20)
    attach(handle).close()
    with allocate(GIB, "cuda:0"):
        pass
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(0)[0]
    for _ in range(20):
        attach(handle).close()
        with allocate(GIB, "cuda:0") as region:
            assert int(region.tensor[-1]) == 0
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info(0)[0] < 32 << 20


@needs_gpus(1)
def test_the_owners_death_is_told(own) -> None:
    process, handle = own(0, 1 << 20)
    process.kill()
    process.join()
    with pytest.raises(MemoryGoneError, match=f"process {handle.pid} is gone"):
        attach(handle)


@needs_gpus(1)
def test_too_much_is_refused_with_the_figures() -> None:
    with pytest.raises(SharedMemoryError, match=r"cannot allocate 4096\.00 GiB .* on cuda:0"):
        allocate(4096 * GIB, "cuda:0")


@needs_gpus(2)
@pytest.mark.parametrize(("visible", "index"), [("1,0", 0), ("0,1", 1)])
def test_a_gpu_is_found_by_uuid_whatever_its_index(own, visible: str, index: int) -> None:
    _, handle = own(1, 1 << 20)
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_attach_with, args=(there, visible, handle))
    process.start()
    assert here.recv() == (index, [5])
    process.join()


@needs_gpus(2)
def test_a_gpu_that_is_not_visible_is_named(own) -> None:
    _, handle = own(1, 1 << 20)
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_attach_with, args=(there, "0", handle))
    process.start()
    assert f"{handle.gpu_uuid} is not visible" in here.recv()
    process.join()
