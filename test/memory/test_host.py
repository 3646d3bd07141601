"""Host regions: seen by all, owned by one, gone with the owner, flat over cycles."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from sglang_adapt.memory import (
    HostHandle,
    MemoryGoneError,
    RegionHandle,
    SharedMemoryError,
    allocate,
    attach,
)

FORK = multiprocessing.get_context("fork")


def test_a_region_is_zeroed_and_shared_both_ways() -> None:
    with allocate(1 << 16, "cpu") as region, attach(region.handle, "write") as mapping:
        assert region.owned and not mapping.owned
        assert region.tensor.dtype == torch.uint8 and region.tensor.shape == (1 << 16,)
        assert int(mapping.tensor.sum()) == 0
        region.tensor[10] = 7
        mapping.tensor[11] = 8
        assert mapping.tensor[10] == 7 and region.tensor[11] == 8


def test_the_handle_survives_encoding() -> None:
    with allocate(64, "cpu") as region:
        data = msgspec.json.encode(region.handle)
        assert msgspec.json.decode(data, type=RegionHandle) == region.handle


def test_views_outlive_the_region() -> None:
    region = allocate(1 << 12, "cpu")
    view = region.tensor.view(torch.float32)[4:8]
    view.fill_(2.5)
    region.close()
    assert region.closed and view.tolist() == [2.5] * 4
    with pytest.raises(SharedMemoryError, match="was closed"):
        _ = region.tensor


def test_holds_knows_views_from_private_memory() -> None:
    with allocate(1 << 12, "cpu") as region:
        matrix = region.tensor.view(torch.float32).view(32, 32)
        assert region.holds(matrix) and region.holds(matrix[:, 8:16]) and region.holds(matrix[31, 31])
        assert not region.holds(matrix.clone())


def _own(pipe: Connection) -> None:
    region = allocate(1 << 12, "cpu")
    region.tensor.fill_(3)
    pipe.send(region.handle)
    pipe.recv()


@pytest.fixture
def owner() -> tuple[multiprocessing.process.BaseProcess, HostHandle]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=_own, args=(there,))
    process.start()
    there.close()
    yield process, here.recv()
    process.kill()
    process.join()


def test_another_process_attaches_and_its_death_takes_the_memory_along(owner) -> None:
    process, handle = owner
    mapping = attach(handle)
    assert mapping.tensor.unique().tolist() == [3]
    process.kill()
    process.join()
    with pytest.raises(MemoryGoneError, match=rf"process {handle.pid} is gone"):
        attach(handle)
    # What is mapped stays readable: an engine outlives its keeper without a crash.
    assert mapping.tensor.unique().tolist() == [3]


def test_a_closed_region_is_not_mistaken_for_the_next_file_at_its_descriptor() -> None:
    region = allocate(1 << 12, "cpu")
    handle = region.handle
    region.close()
    with allocate(1 << 12, "cpu") as other:
        assert other.handle.fd == handle.fd
        with pytest.raises(MemoryGoneError, match="not the shared memory"):
            attach(handle)


def _write(handle: HostHandle) -> None:
    faulthandler.disable()
    attach(handle, "read").tensor[0] = 1


def test_a_write_to_a_read_mapping_ends_the_writer_and_spoils_nothing() -> None:
    with allocate(1 << 12, "cpu") as region:
        process = FORK.Process(target=_write, args=(region.handle,))
        process.start()
        process.join(30)
        assert process.exitcode == -signal.SIGSEGV
        assert int(region.tensor[0]) == 0


def test_cycles_of_allocate_and_attach_leave_memory_files_and_mappings_flat() -> None:
    this = psutil.Process()

    def cycle() -> None:
        with allocate(1 << 22, "cpu") as region, attach(region.handle) as mapping:
            region.tensor.fill_(1)
            assert int(mapping.tensor[-1]) == 1

    def facts() -> tuple[int, int]:
        return this.num_fds(), sum("memfd:sglang_adapt" in m.path for m in this.memory_maps())

    cycle()
    # What other tests have left is not to go meanwhile.
    gc.collect()
    before, memory = facts(), this.memory_info().rss
    for _ in range(100):
        cycle()
    assert facts() == before
    assert this.memory_info().rss - memory < 16 << 20, "100 cycles of 4 MiB each left memory behind"


def test_nothing_of_it_lies_in_dev_shm() -> None:
    with allocate(1 << 20, "cpu") as region, attach(region.handle) as mapping:
        addresses = {f"{tensor.data_ptr():x}" for tensor in (region.tensor, mapping.tensor)}
        paths = {
            line.split(maxsplit=5)[5]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.split("-")[0] in addresses
        }
        assert paths == {"/memfd:sglang_adapt (deleted)"}


@pytest.mark.parametrize("nbytes", [0, -4])
def test_a_region_needs_a_size(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        allocate(nbytes, "cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="not on meta"):
        allocate(8, "meta")
