"""Copy plans: any pair of TP sizes, any placement, any lengths, against a token-by-token reference."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from kv_world import World, worlds_with_batches

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.copiers import CpuCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.geometry import QUANTUM, PoolGeometry
from sglang_adapt.kv.plan import CopyBatch, PlanError, RequestCopy, SourcePlan
from sglang_adapt.kv.plan_build import build_plans


def run(world: World, plans: tuple[SourcePlan, ...]) -> None:
    for plan in plans:
        DirectExecutor.on(world.geometry, plan.gpu, world.regions, CpuCopier()).start(plan).wait()


def quanta(plan: SourcePlan, gpu: int, end: str) -> np.ndarray:
    """Every quantum of a plane that a plan touches at one end on one GPU, with repetitions."""
    touched = []
    for index in range(plan.units):
        route = plan.routes[plan.route[index]]
        if end == "dest" and route.dest_gpu != gpu:
            continue
        start = plan.source[index] if end == "source" else plan.dest[index]
        stride = route.source_stride if end == "source" else route.dest_stride
        for row in range(plan.tokens[index]):
            touched.append(np.arange(plan.row_quanta) + start + row * stride)
    return np.concatenate(touched) if touched else np.zeros(0, dtype=np.int64)


@settings(deadline=None, max_examples=100)
@given(worlds_with_batches())
def test_destinations_equal_a_reference_gather_and_nothing_else_changes(
    case: tuple[World, tuple[CopyBatch, ...]],
) -> None:
    world, batches = case
    run(world, build_plans(world.geometry, batches))
    world.assert_as_expected()


@settings(deadline=None, max_examples=40)
@given(worlds_with_batches())
def test_every_byte_is_moved_exactly_once(case: tuple[World, tuple[CopyBatch, ...]]) -> None:
    world, batches = case
    g = world.geometry
    plans = build_plans(g, batches)
    needed = dict.fromkeys(range(world.gpus), 0)
    for batch in batches:
        for request in batch.requests:
            for gpu in batch.dest:
                needed[gpu] += (request.end_token - request.first_token) * g.token_bytes(len(batch.dest))
    for gpu in range(world.gpus):
        written = np.concatenate([quanta(plan, gpu, "dest") for plan in plans] or [np.zeros(0)])
        assert len(written) == len(np.unique(written))
        assert len(written) * QUANTUM == needed[gpu]
        assert sum(plan.plane_bytes_to().get(gpu, 0) for plan in plans) == needed[gpu]
    for plan in plans:
        owned = np.concatenate(
            [
                request.source_blocks[batch.source.index(plan.gpu)]
                for batch in batches
                if plan.gpu in batch.source
                for request in batch.requests
            ]
        )
        assert np.isin(quanta(plan, plan.gpu, "source") * QUANTUM // g.block_bytes, owned).all()
        assert plan.units == 0 or (plan.tokens.min() >= 1 and plan.tokens.max() <= plan.unit_tokens)


def pool(kv_heads: int = 8, finest_tp: int = 8, blocks: int = 200, page_tokens: int = 4) -> PoolGeometry:
    return PoolGeometry(
        layers=1,
        kv_heads=kv_heads,
        head_dim=8,
        itemsize=2,
        finest_tp=finest_tp,
        block_bytes=page_tokens * kv_heads * 16,
        blocks=blocks,
    )


def test_heads_that_the_destination_gpu_has_are_read_there() -> None:
    """TP 1 -> 2 on the same GPU and a second one: half stays, half crosses."""
    world = World(pool(), 2, seed=0)
    batch = CopyBatch((1,), (0, 1), (world.request("a", (1,), (0, 1), 0, 64),))
    (plan,) = build_plans(world.geometry, [batch])
    assert plan.gpu == 1
    assert plan.plane_bytes_to() == {0: 64 * 4 * 16, 1: 64 * 4 * 16}


@pytest.mark.parametrize(("narrow", "wide"), [(1, 2), (2, 4), (1, 4), (2, 8)])
def test_of_what_a_wider_engine_needs_of_a_gpu_its_own_rank_takes_all(narrow: int, wide: int) -> None:
    """Each GPU of the narrow engine sends equal parts to wide / narrow GPUs, of which it is one itself."""
    world = World(pool(), 8, seed=0)
    source, dest = EngineSpec(0, narrow).gpus, EngineSpec(0, wide).gpus
    plans = build_plans(world.geometry, [CopyBatch(source, dest, (world.request("a", source, dest, 0, 64),))])
    assert [plan.gpu for plan in plans] == sorted(source)
    for plan in plans:
        assert plan.plane_bytes_to() == dict.fromkeys(range(plan.gpu, wide, narrow), 64 * 8 // wide * 16)


def test_replicas_of_a_head_are_read_on_the_same_gpu_first_and_share_the_rest() -> None:
    """TP 8 over 2 KV heads: each head has 4 holders. The destination ranks on GPUs 0 and 5 read locally; the
    ones on GPUs 8 and 9 hold nothing and are served by different replicas."""
    g = pool(kv_heads=2)
    world = World(g, 10, seed=1)
    source = tuple(range(8))
    near = CopyBatch(source, (0, 5), (world.request("near", source, (0, 5), 0, 6),))
    far = tuple(CopyBatch(source, (gpu,), (world.request(f"far{gpu}", source, (gpu,), 0, 6),)) for gpu in (8, 9))
    plans = build_plans(g, [near])
    assert [(plan.gpu, plan.dest_gpus) for plan in plans] == [(0, (0,)), (5, (5,))]
    wide = CopyBatch(source, (8, 9, 4, 6), (world.request("wide", source, (8, 9, 4, 6), 0, 6),))
    by_source = {plan.gpu: plan.dest_gpus for plan in build_plans(g, [wide])}
    assert by_source == {0: (8,), 1: (9,), 4: (4,), 6: (6,)}, "ranks 0 and 1 of the destination share head 0"
    run(world, build_plans(g, [near, wide, *far]))
    world.assert_as_expected()


def test_a_pair_of_tp_sizes_moves_the_largest_common_pieces() -> None:
    world = World(pool(), 4, seed=0)
    down = CopyBatch((0, 1, 2, 3), (2,), (world.request("a", (0, 1, 2, 3), (2,), 0, 16),))
    plan = build_plans(world.geometry, [down])[0]
    assert (plan.unit_tokens, plan.unit_heads, plan.row_bytes) == (4, 2, 32)
    same = CopyBatch((0, 1), (2, 3), (world.request("b", (0, 1), (2, 3), 0, 16),))
    plan = build_plans(world.geometry, [same])[0]
    assert (plan.unit_tokens, plan.unit_heads) == (8, 4)
    merged = {plan.gpu: (plan.unit_tokens, plan.unit_heads) for plan in build_plans(world.geometry, [down, same])}
    assert merged == {0: (4, 2), 1: (4, 2), 2: (4, 2), 3: (4, 2)}
    run(world, build_plans(world.geometry, [down, same]))
    world.assert_as_expected()


def test_batches_are_interleaved_so_that_no_destination_is_served_last() -> None:
    """TP 4 -> four TP 1: each source sends to all four GPUs in every quarter of its plan."""
    world = World(pool(), 4, seed=0)
    source = (0, 1, 2, 3)
    batches = [CopyBatch(source, (gpu,), (world.request(str(gpu), source, (gpu,), 0, 128),)) for gpu in source]
    for plan in build_plans(world.geometry, batches):
        gpus = np.array([route.dest_gpu for route in plan.routes])[plan.route]
        for quarter in np.array_split(gpus, 4):
            assert set(quarter.tolist()) == {0, 1, 2, 3}


def test_nothing_to_copy_gives_no_plan() -> None:
    world = World(pool(), 2, seed=0)
    empty = world.request("a", (0,), (1,), 3, 3)
    assert build_plans(world.geometry, []) == ()
    assert build_plans(world.geometry, [CopyBatch((0,), (1,), ()), CopyBatch((0,), (1,), (empty,))]) == ()


def blocks(*ids: int, ranks: int = 1) -> np.ndarray:
    return np.array([ids] * ranks, dtype=np.int32).reshape(ranks, len(ids))


@pytest.mark.parametrize(
    ("request_", "dest", "message"),
    [
        (
            RequestCopy("q", 9, blocks(1, 2, 3), blocks(4, 5)),
            (0,),
            "q: tokens 0 to 9 need 3 dest blocks at TP 1",
        ),
        (RequestCopy("q", 9, blocks(1, 2), blocks(4, 5, 6)), (0,), "q: tokens 0 to 9 need 3 source blocks"),
        (RequestCopy("q", 4, blocks(0), blocks(4)), (0,), "q: source block 0 of rank 0 does not exist"),
        (RequestCopy("q", 4, blocks(1), blocks(200)), (0,), "q: dest block 200 of rank 0"),
        (RequestCopy("q", 4, blocks(1), blocks(4)), (0, 1), "q: dest blocks have shape"),
        (RequestCopy("q", 4, blocks(1), blocks(4), 5), (0,), "q: tokens 5 to 4 are no range"),
        (RequestCopy("q", 4, blocks(1), blocks(4, ranks=2)), (3, 3), "names a GPU twice"),
    ],
)
def test_requests_that_cannot_be_copied_are_named(request_: RequestCopy, dest: tuple[int, ...], message: str) -> None:
    fine = RequestCopy("fine", 4, blocks(7), blocks(8, ranks=len(dest)))
    with pytest.raises(PlanError, match=message):
        build_plans(pool(), [CopyBatch((0,), dest, (fine, request_))])


def test_a_plan_for_5_gb_is_built_in_milliseconds() -> None:
    """Llama-3.1-8B, pages of 16 tokens, 64 requests on each of 2 GPUs, TP 1 -> 2; the best of a few tries."""
    g = PoolGeometry.from_pool_bytes(
        20 << 30, layers=32, kv_heads=8, head_dim=128, itemsize=2, finest_tp=2, page_tokens=16
    )
    rng = np.random.default_rng(0)
    per_request = 5_000_000_000 // (g.planes * g.block_bytes) // 64
    batches = []
    ids = {gpu: iter(rng.permutation(np.arange(1, g.blocks)).astype(np.int32)) for gpu in (0, 1)}

    def take(gpu: int, count: int) -> list[int]:
        return [next(ids[gpu]) for _ in range(count)]

    for gpu in (0, 1):
        requests = tuple(
            RequestCopy(
                f"r{gpu}.{index}",
                per_request * 16 - 3,
                np.array([take(gpu, per_request)], dtype=np.int32),
                np.array([take(rank, -(-per_request // 2)) for rank in (0, 1)], dtype=np.int32),
            )
            for index in range(64)
        )
        batches.append(CopyBatch((gpu,), (0, 1), requests))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        plans = build_plans(g, batches)
        best = min(best, time.perf_counter() - begin)
    total = sum(g.planes * sum(plan.plane_bytes_to().values()) for plan in plans)
    assert total > 2 * 4.9e9
    print(f"plan of 2 x {total / 2e9:.2f} GB: {best * 1e3:.2f} ms")
    assert best < 0.02, f"{best * 1e3:.1f} ms for both GPUs' plans of 5 GB"
