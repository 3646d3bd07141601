"""Staged copies as ranks ask for them: who sends a GPU's KV, who receives it, and what becomes of either when the other
dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import staged_children
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import World, worlds_with_batches

from sglang_adapt.core.handoff import AdoptCall, CarriedRequest, KvSource, RequestKind
from sglang_adapt.engine.copying import CopyRefusedError, KvCopies, Pull
from sglang_adapt.kv.copiers import Copiers, CpuCopier, copiers_of
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import NOW
from sglang_adapt.kv.plan import CopyBatch, SourcePlan
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged import Drained, Filled
from sglang_adapt.kv.staged_client import StagedClient
from sglang_adapt.kv.staged_handle import Order, StagedHandle
from sglang_adapt.kv.staged_server import StagedServer
from sglang_adapt.kv.staging import buffer_bytes
from sglang_adapt.memory import allocate

GEOMETRY = PoolGeometry(layers=2, kv_heads=4, head_dim=8, itemsize=2, finest_tp=4, block_bytes=4 * 4 * 16, blocks=60)
UNIT = 4 * 4 * 2 * 16  # planes x tokens x heads x bytes, TP 1 <-> 2


def serve(world: World, gpu: int, size: int, folder: Path, timeout_s: float = 20) -> StagedServer:
    """Send the KV of a GPU, whose region is shared memory from now on."""
    region = allocate(world.geometry.region_bytes, "cpu")
    region.tensor.copy_(world.regions[gpu].view(-1).view(torch.uint8))
    world.regions[gpu] = region.tensor.view(torch.int16).view(world.geometry.region_shape)
    return StagedServer(f"GPU {gpu}", world.geometry, region, allocate(2 * size, "cpu"), f"{folder}/{gpu}", timeout_s)


def client(
    world: World, gpu: int, handles: Mapping[int, StagedHandle], copiers: Copiers | None = None, timeout_s: float = 20
) -> StagedClient:
    made = StagedClient(world.geometry, gpu, world.regions[gpu], copiers or copiers_of(torch.device("cpu")), timeout_s)
    for source, handle in handles.items():
        made.open(source, handle)
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets, whose paths are short."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def a_request(seed: int = 4) -> tuple[World, SourcePlan]:
    """38 tokens from GPU 0 to TP 2 on GPUs 1 and 2: ten units to GPU 1."""
    world = World(GEOMETRY, 3, seed)
    batch = CopyBatch((0,), (1, 2), (world.request("a", (0,), (1, 2), 0, 38),))
    return world, build_plans(GEOMETRY, [batch])[0].to_gpu(1)


@settings(deadline=None, max_examples=30)
@given(worlds_with_batches(), st.integers(1, 4), st.booleans())
def test_any_copy_with_tiny_buffers_equals_the_reference(
    case: tuple[World, tuple[CopyBatch, ...]], units: int, ahead: bool
) -> None:
    world, batches = case
    plans = build_plans(world.geometry, batches)
    with tempfile.TemporaryDirectory() as path:
        largest = max([world.geometry.planes * plan.unit_tokens * plan.row_bytes for plan in plans], default=16)
        sources = {gpu: serve(world, gpu, units * largest + 16, Path(path)) for gpu in range(world.gpus)}
        handles = {gpu: server.handle for gpu, server in sources.items()}
        deliveries = []
        # All GPUs ask all others at once, those for their own blocks too.
        for gpu in range(world.gpus):
            mine = [plan.to_gpu(gpu) for plan in plans]
            deliveries.append(client(world, gpu, handles).begin([p for p in mine if p.units], NOW, ahead=ahead))
        for delivery in deliveries:
            delivery.wait()
            assert delivery.fault is None
        for server in sources.values():
            server.close()
    world.assert_as_expected()


def test_a_buffer_holds_any_unit() -> None:
    assert buffer_bytes(64, 16 << 10, virtual=False) == 32 << 20
    assert buffer_bytes(128, 1 << 20, virtual=False) == 128 << 20
    assert buffer_bytes(6, 8192, virtual=True) == 128 << 10
    assert buffer_bytes(6, 1 << 20, virtual=True) == 6 << 20


def test_who_stops_receiving_does_not_hold_up_the_next(folder: Path) -> None:
    world, plan = a_request()
    server = serve(world, 0, 2 * UNIT, folder, timeout_s=0.2)
    silent, gone = (Client(server.handle.address, "AF_UNIX") for _ in range(2))
    for channel in (silent, gone):
        # The second one has its turn when the first has been silent for 0.2 s.
        channel.send(Order(plan, ahead=False))
        assert channel.recv() == Filled(0)
    gone.close()
    delivery = client(world, 1, {0: server.handle}).begin([plan], NOW, ahead=False)
    delivery.wait()
    assert delivery.fault is None
    assert torch.equal(world.regions[1], world.expected[1])
    with pytest.raises((EOFError, OSError)):
        while True:
            silent.send(Drained(0))
            silent.recv()


def test_a_sender_that_is_silent_is_given_up(folder: Path) -> None:
    world, plan = a_request()
    server = serve(world, 0, 2 * UNIT, folder)
    receiver = client(world, 1, {0: server.handle}, timeout_s=0.1)
    with server._turn:  # somebody else's copy that does not end
        delivery = receiver.begin([plan], NOW, ahead=False)
        delivery.wait()
    assert delivery.fault is not None
    assert delivery.fault.endswith("has not come: GPU 1 waits for chunk 0 to be filled, but nothing came in 0.1 s")
    # What it says late is not taken for the answer to the next order.
    again = receiver.begin([plan], NOW, ahead=False)
    again.wait()
    assert again.fault is None
    assert torch.equal(world.regions[1], world.expected[1])


@dataclass
class Killing(CpuCopier):
    """Kills a process when the second chunk is to be scattered."""

    pid: int
    copied: int = 0

    def copy(self, source, dests, table, shape) -> None:  # type: ignore[no-untyped-def]
        super().copy(source, dests, table, shape)
        self.copied += 1
        if self.copied == 2:
            os.kill(self.pid, signal.SIGKILL)


class Source:
    """GPU 0's keeper, in a process of its own."""

    def __init__(self, world: World, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        content = world.regions[0].view(-1).view(torch.uint8).numpy().tobytes()
        self.process = context.Process(
            target=staged_children.send, args=(GEOMETRY, content, 2 * UNIT, f"{folder}/out", theirs), daemon=True
        )
        self.process.start()
        self.pid, self.handle = self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def dying(folder: Path) -> Iterator[tuple[World, SourcePlan, Source]]:
    world, plan = a_request()
    source = Source(world, folder)
    yield world, plan, source
    source.end()


def test_a_source_that_dies_in_the_middle_fails_the_copy_and_nothing_else(
    dying: tuple[World, SourcePlan, Source], folder: Path
) -> None:
    world, plan, source = dying
    copier = Killing(source.pid)
    receiver = client(world, 1, {0: source.handle}, Copiers(copier, copier))
    delivery = receiver.begin([plan], NOW, ahead=False)
    delivery.wait()
    # One more chunk may have been on its way.
    assert copier.copied in (2, 3)
    assert delivery.fault is not None and "the other end is gone" in delivery.fault
    half = world.regions[1].clone()
    source.process.join()
    again = receiver.begin([plan], NOW, ahead=False)
    again.wait()
    assert again.fault is not None and again.fault.startswith(
        "CopyError: the KV of GPU 0 has not come, who sends it is gone"
    )
    assert torch.equal(world.regions[1], half), "nothing is written after the end"
    # Its keeper is started anew, and known by a new handle.
    receiver.open(0, serve(world, 0, 2 * UNIT, folder).handle)
    last = receiver.begin([plan], NOW, ahead=False)
    last.wait()
    assert last.fault is None
    assert torch.equal(world.regions[1], world.expected[1])


def ranks_copies(world: World, source: Source, copier: CpuCopier) -> tuple[KvCopies, KvSource, list[int]]:
    """A rank of tp2@1-2 on GPU 1 that is told of all GPUs; where a request of GPU 0 lies, and its blocks here."""
    copies = KvCopies("tp2@1-2", GEOMETRY, (1, 2), 0, world.regions[1])
    copies._copiers = Copiers(copier, copier)
    copies.map(dict.fromkeys(range(3), source.handle))
    request = world.request("a", (0,), (1, 2), 0, 0)
    assert request.end_token == 0
    return copies, KvSource([0], [list(range(1, 11))]), list(range(1, 6))


def test_a_move_is_refused_when_its_source_dies(dying: tuple[World, SourcePlan, Source]) -> None:
    """A switch: nothing may be taken up whose KV has not come."""
    world, _, source = dying
    copies, where, blocks = ranks_copies(world, source, Killing(source.pid))
    carried = CarriedRequest("a", RequestKind.RUNNING, 38, 39, 60, None, b"")
    call = AdoptCall(1, [carried], [[blocks], [blocks]], sources=[where])
    with pytest.raises(
        CopyRefusedError, match=r"tp2@1-2: CopyError: the KV of GPU 0 has not come: .* the other end is gone"
    ):
        copies.start(call)


def test_a_hand_over_tells_that_its_source_has_died(dying: tuple[World, SourcePlan, Source]) -> None:
    world, _, source = dying
    copies, where, blocks = ranks_copies(world, source, Killing(source.pid))
    pulled = copies.pull([Pull("a", 0, 38, where, blocks)], NOW)
    pulled.wait()
    assert pulled.by_host and pulled.ended
    assert pulled.fault is not None and "the other end is gone" in pulled.fault


def test_ranks_with_nothing_to_fetch_see_a_staged_copy_as_well(dying: tuple[World, SourcePlan, Source]) -> None:
    """All ranks of an engine wait for one another where one of them has to."""
    world, _, source = dying
    copies, _, _ = ranks_copies(world, source, CpuCopier())
    pulled = copies.pull([], NOW)
    assert pulled.by_host and pulled.ended and pulled.fault is None
    direct = KvCopies("tp1@1", GEOMETRY, (1,), 0, world.regions[1]).pull([], NOW)
    assert not direct.by_host and direct.ended


def test_what_lies_on_the_same_gpu_is_not_sent(dying: tuple[World, SourcePlan, Source]) -> None:
    world, _, source = dying
    copies, _, _ = ranks_copies(world, source, CpuCopier())
    source.end()
    before = world.regions[1].view(2, 2, 60, -1)[:, :, 1:6].clone()
    pulled = copies.pull([Pull("b", 0, 8, KvSource([1, 2], [[1], [1]]), [20])], NOW)
    pulled.wait()
    assert pulled.fault is None
    assert torch.equal(world.regions[1].view(2, 2, 60, -1)[:, :, 20], before[:, :, 0])
