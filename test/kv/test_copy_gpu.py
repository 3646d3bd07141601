"""The same copies on a GPU: every region of a small world on one device, the kernel compiled instead of
interpreted."""

from __future__ import annotations

import tempfile
import threading
from multiprocessing import Pipe

import pytest
import torch
from hypothesis import given, settings
from kv_world import World, worlds_with_batches

from sglang_adapt.kv.checked import CheckedExecutor
from sglang_adapt.kv.copiers import TritonCopier, copiers_of
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.lanes import NOW
from sglang_adapt.kv.plan import CopyBatch, SourcePlan
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged import StagedReceiver, StagedSender
from sglang_adapt.kv.staged_client import StagedClient
from sglang_adapt.kv.staged_server import StagedServer
from sglang_adapt.memory import allocate

pytestmark = pytest.mark.gpu


@settings(deadline=None, max_examples=25)
@given(worlds_with_batches())
def test_direct_copies_on_a_gpu_equal_the_reference(case: tuple[World, tuple[CopyBatch, ...]]) -> None:
    world, batches = case
    regions = {gpu: region.cuda() for gpu, region in world.regions.items()}
    for plan in build_plans(world.geometry, batches):
        inner = DirectExecutor.on(world.geometry, plan.gpu, regions, TritonCopier())
        CheckedExecutor(inner).start(plan)
    for gpu, region in regions.items():
        assert torch.equal(region.cpu(), world.expected[gpu]), f"GPU {gpu}"


@pytest.mark.parametrize("through_host", [False, True])
@settings(deadline=None, max_examples=10)
@given(case=worlds_with_batches())
def test_staged_copies_on_a_gpu_equal_the_reference(
    through_host: bool, case: tuple[World, tuple[CopyBatch, ...]]
) -> None:
    world, batches = case
    regions = {gpu: region.cuda() for gpu, region in world.regions.items()}
    for plan in build_plans(world.geometry, batches):
        for gpu in plan.dest_gpus:
            _stage(world, regions, plan.to_gpu(gpu), gpu, through_host)
    for gpu, region in regions.items():
        assert torch.equal(region.cpu(), world.expected[gpu]), f"GPU {gpu}"


_mapped: list[StagedServer | StagedClient] = []
"""Memory that is pinned must not be unmapped before the process ends."""


@settings(deadline=None, max_examples=8)
@given(case=worlds_with_batches())
def test_what_keepers_send_equals_the_reference(case: tuple[World, tuple[CopyBatch, ...]]) -> None:
    """All GPUs' regions on one device; each asks all others at once, through host memory of two units a chunk."""
    world, batches = case
    plans = build_plans(world.geometry, batches)
    g, device = world.geometry, torch.device("cuda", 0)
    size = 16 + 2 * max([g.planes * plan.unit_tokens * plan.row_bytes for plan in plans], default=16)
    regions = {gpu: allocate(g.region_bytes, device) for gpu in world.regions}
    with tempfile.TemporaryDirectory() as folder:
        servers = {}
        for gpu, region in regions.items():
            region.tensor.copy_(world.regions[gpu].view(-1).view(torch.uint8))
            servers[gpu] = StagedServer(f"GPU {gpu}", g, region, allocate(2 * size, "cpu"), f"{folder}/{gpu}")
        deliveries = []
        for gpu, region in regions.items():
            client = StagedClient(g, gpu, region.tensor.view(torch.int16).view(g.region_shape), copiers_of(device))
            for source, server in servers.items():
                client.open(source, server.handle)
            mine = [part for plan in plans if (part := plan.to_gpu(gpu)).units]
            deliveries.append(client.begin(mine, NOW, ahead=gpu % 2 == 1))
            _mapped.append(client)
        for delivery in deliveries:
            delivery.wait()
            assert delivery.fault is None
        for server in servers.values():
            server.close()
            _mapped.append(server)
    for gpu, region in regions.items():
        assert torch.equal(region.tensor.cpu(), world.expected[gpu].view(-1).view(torch.uint8)), f"GPU {gpu}"


def _stage(world: World, regions: dict[int, torch.Tensor], plan: SourcePlan, gpu: int, through_host: bool) -> None:
    """Both ends in this process, with buffers of two units."""
    size, g = 2 * world.geometry.planes * plan.unit_tokens * plan.row_bytes, world.geometry

    def two(where: str) -> list[torch.Tensor]:
        pinned = where == "cpu"
        return [torch.zeros(size, dtype=torch.uint8, device=where, pin_memory=pinned) for _ in range(2)]

    link, (near, far) = two("cpu" if through_host else "cuda"), Pipe()
    sender = StagedSender(g, plan.gpu, regions[plan.gpu], two("cuda"), link, TritonCopier(), near, 20, checked=True)
    own = two("cuda") if through_host else None
    receiver = StagedReceiver(g, gpu, regions[gpu], link, own, TritonCopier(), far, 20)
    thread = threading.Thread(target=sender.run, args=(plan,))
    thread.start()
    receiver.run(plan)
    thread.join(30)
    assert not thread.is_alive()
