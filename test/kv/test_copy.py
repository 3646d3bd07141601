"""Executors: what they refuse, layer runs, checksums that name the spoiled block, and the Triton one
interpreted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from kv_world import World

from sglang_adapt.engine.copying import KvCopies
from sglang_adapt.kv.checked import CheckedExecutor
from sglang_adapt.kv.checksums import CopyMismatch
from sglang_adapt.kv.copiers import CpuCopier, PageCopier, TritonCopier, UnitShape
from sglang_adapt.kv.copy import CopyError, DirectExecutor
from sglang_adapt.kv.geometry import GeometryError, PoolGeometry
from sglang_adapt.kv.lanes import NOW, Mark, Marks
from sglang_adapt.kv.plan import CopyBatch
from sglang_adapt.kv.plan_build import build_plans

GEOMETRY = PoolGeometry(layers=3, kv_heads=4, head_dim=8, itemsize=2, finest_tp=4, block_bytes=4 * 4 * 16, blocks=60)


def merge_case(seed: int = 0) -> tuple[World, tuple[CopyBatch, ...]]:
    """Three requests of odd lengths from TP 1 on GPUs 0 and 1 to TP 2 on both, and back to TP 1 on GPU 2."""
    world = World(GEOMETRY, 3, seed)
    to_two = tuple(
        CopyBatch(
            (gpu,),
            (0, 1),
            tuple(world.request(f"g{gpu}.{n}", (gpu,), (0, 1), 0, 4 * n + 3) for n in range(3)),
        )
        for gpu in (0, 1)
    )
    to_one = CopyBatch((0, 1), (2,), (world.request("back", (0, 1), (2,), 2, 21),))
    return world, (*to_two, to_one)


def test_checked_copy_passes_a_good_copy() -> None:
    world, batches = merge_case()
    for plan in build_plans(GEOMETRY, batches):
        inner = DirectExecutor.on(GEOMETRY, plan.gpu, world.regions, CpuCopier())
        assert CheckedExecutor(inner).start(plan).reached()
    world.assert_as_expected()


class SpoilingCopier(CpuCopier):
    """A copier that changes one element at a destination after a correct copy."""

    def __init__(self, dest: torch.Tensor, at: tuple[int, ...]) -> None:
        self.dest, self.at = dest, at

    def copy(self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape) -> None:
        super().copy(source, dests, table, shape)
        self.dest[self.at] += 1


@pytest.mark.parametrize("number", [0, 1, 2])
def test_checked_copy_names_the_request_the_layer_and_the_block(number: int) -> None:
    world, batches = merge_case()
    request = batches[1].requests[number]
    plan = build_plans(GEOMETRY, batches)[1]
    source_block, dest_block = int(request.source_blocks[0, 0]), int(request.dest_blocks[0, 0])
    spoiler = SpoilingCopier(world.regions[0], (1, 1, dest_block, 5))
    inner = DirectExecutor.on(GEOMETRY, 1, world.regions, spoiler)
    message = (
        rf"request g1\.{number}: V of layer 1, KV head 0: block {dest_block} of GPU 0 .* "
        rf"block {source_block} of GPU 1"
    )
    with pytest.raises(CopyMismatch, match=message):
        CheckedExecutor(inner).start(plan)


def test_checksums_see_swapped_words() -> None:
    """A plain sum would not: two elements of one row change places."""
    world, batches = merge_case()
    request = batches[0].requests[0]
    plan = build_plans(GEOMETRY, batches)[0]

    class Swapper(CpuCopier):
        def copy(
            self, source: torch.Tensor, dests: Sequence[torch.Tensor], table: torch.Tensor, shape: UnitShape
        ) -> None:
            super().copy(source, dests, table, shape)
            row = world.regions[0].view(torch.int64)[0, 0, int(request.dest_blocks[0, 0])]
            row[:2] = row[:2].flip(0)

    with pytest.raises(CopyMismatch, match=r"request g0\.0: K of layer 0"):
        CheckedExecutor(DirectExecutor.on(GEOMETRY, 0, world.regions, Swapper())).start(plan)


def test_layers_can_be_copied_in_runs() -> None:
    world, batches = merge_case()
    plans = build_plans(GEOMETRY, batches)
    for plan in plans:
        executor = DirectExecutor.on(GEOMETRY, plan.gpu, world.regions, CpuCopier())
        executor.start(plan, range(1)).wait()
        CheckedExecutor(executor).start(plan, range(2, 3)).wait()
    layer_1 = {gpu: region[1].clone() for gpu, region in world.regions.items()}
    for gpu, region in world.regions.items():
        assert torch.equal(region[0], world.expected[gpu][0])
        assert torch.equal(region[2], world.expected[gpu][2])
    for plan in plans:
        DirectExecutor.on(GEOMETRY, plan.gpu, world.regions, CpuCopier()).start(plan, range(1, 2)).wait()
    assert any(not torch.equal(layer_1[gpu], world.regions[gpu][1]) for gpu in world.regions)
    world.assert_as_expected()


def test_plans_that_an_executor_cannot_carry_out_are_refused() -> None:
    world, batches = merge_case()
    plan = build_plans(GEOMETRY, batches)[0]
    with pytest.raises(CopyError, match="source GPU 0, this executor is on GPU 1"):
        DirectExecutor.on(GEOMETRY, 1, world.regions, CpuCopier()).start(plan)
    alone = DirectExecutor.on(GEOMETRY, 0, {0: world.regions[0]}, CpuCopier())
    with pytest.raises(CopyError, match="region of GPU 1 is not mapped on GPU 0"):
        alone.start(plan)
    with pytest.raises(CopyError, match=r"no run of the pool's 3 layers"):
        DirectExecutor.on(GEOMETRY, 0, world.regions, CpuCopier()).start(plan, range(2, 4))
    with pytest.raises(CopyError, match="GPU 3 has no region"):
        DirectExecutor.on(GEOMETRY, 3, world.regions, CpuCopier())
    with pytest.raises(GeometryError, match="shape"):
        DirectExecutor.on(GEOMETRY, 0, {0: world.regions[0][:2]}, CpuCopier())


def test_the_triton_copier_interpreted_carries_out_a_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that GPUs run, in Triton's interpreter: several destinations, strides and partial units at
    once."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.find_spec("sgl_kernel_ext.kv_copy")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "sgl_kernel_ext.kv_copy", module)
    world, batches = merge_case()
    for plan in build_plans(GEOMETRY, batches):
        copier = TritonCopier(programs=5)
        DirectExecutor.on(GEOMETRY, plan.gpu, world.regions, copier).start(plan).wait()
    world.assert_as_expected()


def test_a_copy_for_each_page_and_plane_brings_the_same() -> None:
    world, batches = merge_case()
    plans = build_plans(GEOMETRY, batches)
    copier = PageCopier()
    for plan in plans:
        DirectExecutor.on(GEOMETRY, plan.gpu, world.regions, copier).start(plan).wait()
    world.assert_as_expected()
    assert copier.copies == sum(plan.units for plan in plans) * GEOMETRY.planes


def test_ranks_copy_page_by_page_only_if_they_are_told_to() -> None:
    region = torch.zeros(GEOMETRY.region_shape, dtype=torch.int16)
    told = KvCopies("tp1@0", GEOMETRY, (0,), 0, region, by_page=True)
    assert type(told._copiers.now) is type(told._copiers.ahead) is PageCopier
    assert type(KvCopies("tp1@0", GEOMETRY, (0,), 0, region)._copiers.now) is CpuCopier


def test_several_marks_are_one() -> None:
    events: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            events.append(f"waited for {self.name}")

    class Stream:
        def wait_event(self, event: Event) -> None:
            events.append(f"after {event.name}")

    marks = Marks([Mark(cast(Any, Event("a"))), NOW, Mark(cast(Any, Event("b")))])
    marks.hold_back(Stream())
    marks.wait()
    assert events == ["after a", "after b", "waited for a", "waited for b"]
