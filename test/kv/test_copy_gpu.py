"""The same copies on a GPU: every region of a small world on one device, the kernel compiled instead of
interpreted."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest
import torch
from hypothesis import given, settings
from kv_world import World, worlds_with_batches

from sglang_adapt.kv.checked import CheckedExecutor
from sglang_adapt.kv.copiers import TritonCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.plan import CopyBatch, SourcePlan
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged import StagedReceiver, StagedSender

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
