"""The double-buffered path: a sender and a receiver in two threads, over a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import World, worlds_with_batches

from sglang_adapt.kv.checksums import CopyMismatch
from sglang_adapt.kv.copiers import CpuCopier
from sglang_adapt.kv.copy import CopyError
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.plan import CopyBatch, SourcePlan
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged import Drained, Filled, StagedReceiver, StagedSender
from sglang_adapt.kv.staging import cut_chunks

GEOMETRY = PoolGeometry(layers=2, kv_heads=4, head_dim=8, itemsize=2, finest_tp=4, block_bytes=4 * 4 * 16, blocks=60)
UNIT = 4 * 4 * 2 * 16  # planes x tokens x heads x bytes, TP 1 <-> 2


def ends(
    world: World,
    plan: SourcePlan,
    gpu: int,
    buffer_bytes: int,
    *,
    through_host: bool = False,
    checked: bool = False,
    timeout_s: float = 20,
) -> tuple[StagedSender, StagedReceiver, tuple[Connection, Connection]]:
    def two() -> list[torch.Tensor]:
        return [torch.zeros(buffer_bytes, dtype=torch.uint8) for _ in range(2)]

    link, (near, far), g = two(), Pipe(), world.geometry
    sender = StagedSender(g, plan.gpu, world.regions[plan.gpu], two(), link, CpuCopier(), near, timeout_s, checked)
    receiver = StagedReceiver(
        g, gpu, world.regions[gpu], link, two() if through_host else None, CpuCopier(), far, timeout_s
    )
    return sender, receiver, (near, far)


def both(send: Callable[[], None], receive: Callable[[], None]) -> list[BaseException]:
    """Run both ends; what they raised, the sender's first."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            send()
        except (CopyError, CopyMismatch) as error:
            errors.insert(0, error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        receive()
    except (CopyError, CopyMismatch) as error:
        errors.append(error)
    thread.join(30)
    assert not thread.is_alive()
    return errors


def transfer(world: World, plan: SourcePlan, gpu: int, buffer_bytes: int, **options: bool) -> None:
    part = plan.to_gpu(gpu)
    sender, receiver, pipes = ends(world, plan, gpu, buffer_bytes, **options)  # type: ignore[arg-type]
    errors = both(lambda: sender.run(part), lambda: receiver.run(part))
    assert errors == []
    assert not any(pipe.poll(0) for pipe in pipes), "a message was left over"


@settings(deadline=None, max_examples=30)
@given(worlds_with_batches(), st.integers(1, 5), st.booleans(), st.booleans())
def test_staged_copies_equal_the_reference(
    case: tuple[World, tuple[CopyBatch, ...]], units: int, through_host: bool, checked: bool
) -> None:
    world, batches = case
    for plan in build_plans(world.geometry, batches):
        unit_bytes = world.geometry.planes * plan.unit_tokens * plan.row_bytes
        for gpu in plan.dest_gpus:
            transfer(world, plan, gpu, units * unit_bytes + 8, through_host=through_host, checked=checked)
    world.assert_as_expected()


def small_case() -> tuple[World, SourcePlan]:
    """One request of 38 tokens from GPU 0 to TP 2 on GPUs 1 and 2: ten units to each, the last one
    partial."""
    world = World(GEOMETRY, 3, seed=4)
    batch = CopyBatch((0,), (1, 2), (world.request("a", (0,), (1, 2), 0, 38),))
    return world, build_plans(GEOMETRY, [batch])[0].to_gpu(1)


def test_chunks_hold_as_many_units_as_fit() -> None:
    _, plan = small_case()
    assert [chunk.units for chunk in cut_chunks(GEOMETRY, plan, 4 * UNIT + UNIT // 2)] == [4, 4, 2]
    assert cut_chunks(GEOMETRY, plan.select(plan.tokens > 99), 0) == []


def test_what_cannot_be_staged_is_refused() -> None:
    world, plan = small_case()
    with pytest.raises(CopyError, match=f"{UNIT - 1} bytes does not hold one unit of {UNIT} bytes"):
        cut_chunks(GEOMETRY, plan, UNIT - 1)
    batch = CopyBatch((0,), (1, 2), (world.request("b", (0,), (1, 2), 0, 8),))
    with pytest.raises(CopyError, match=r"goes to GPUs \(1, 2\)"):
        cut_chunks(GEOMETRY, build_plans(GEOMETRY, [batch])[0], UNIT)


def test_the_sender_fills_a_buffer_only_after_it_was_drained() -> None:
    """With a receiver that never drains, two chunks go out and the third waits, for a bounded time."""
    world, plan = small_case()
    sender, _, (_, far) = ends(world, plan, 1, 2 * UNIT, timeout_s=0.05)
    with pytest.raises(CopyError, match=r"GPU 0 waits for chunk 0 to be drained, but nothing came in 0\.05 s"):
        sender.run(plan)
    assert far.recv() == Filled(0)
    assert not far.poll(0), "chunk 1 is announced when chunk 2 is queued, never before chunk 0 was drained"


def test_a_receiver_without_a_sender_ends_with_an_error() -> None:
    world, plan = small_case()
    _, receiver, (near, _) = ends(world, plan, 1, 2 * UNIT, timeout_s=20)
    near.close()
    with pytest.raises(CopyError, match="GPU 1 waits for chunk 0 to be filled, but the other end is gone"):
        receiver.run(plan)
    sender, _, (_, far) = ends(world, plan, 1, 20 * UNIT)
    far.close()
    with pytest.raises(CopyError, match="GPU 0 is gone at chunk 0"):
        sender.run(plan)


def test_messages_out_of_turn_are_refused() -> None:
    world, plan = small_case()
    sender, receiver, (near, far) = ends(world, plan, 1, 2 * UNIT)
    near.send(Filled(1))
    with pytest.raises(CopyError, match="chunk 0 to be filled and got Filled"):
        receiver.run(plan)
    far.send(Drained(3))
    with pytest.raises(CopyError, match=r"chunk 0 to be drained and got Drained\(chunk=3\)"):
        sender.run(plan)


def test_debug_mode_names_what_was_spoiled_on_the_link() -> None:
    world, plan = small_case()
    sender, receiver, _ = ends(world, plan, 1, 4 * UNIT, checked=True, timeout_s=1)

    class Spoiling(CpuCopier):
        def copy(self, source, dests, table, shape) -> None:  # type: ignore[no-untyped-def]
            if len(table) == 2:  # the third chunk
                source.view(GEOMETRY.planes, -1)[-1, 0] += 1
            super().copy(source, dests, table, shape)

    receiver.copier = Spoiling()
    sender.timeout_s = 0.5
    errors = both(lambda: sender.run(plan), lambda: receiver.run(plan))
    assert [type(error) for error in errors] == [CopyError, CopyMismatch]
    assert "request a: V of layer 1" in str(errors[1])
