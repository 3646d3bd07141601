"""The memory plan of a deployment: what the pure part (`policy.memory_plan`) is told of GPUs, model and overheads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_adapt.core.config import WARMUP
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import nesting
from sglang_adapt.core.overheads import PACKAGED, VIRTUAL_GPU, Overhead, OverheadKey, read_overheads
from sglang_adapt.kv.geometry import GeometryError
from sglang_adapt.kv.sizing import KvShape, PoolCost, pool_cost, size_pool
from sglang_adapt.kv.staged import BUFFERS
from sglang_adapt.kv.staging import buffer_bytes
from sglang_adapt.policy.memory_plan import Charge, MemoryPlan, Place, plan_memory
from sglang_adapt.policy.overheads import estimate_overhead

if TYPE_CHECKING:
    from sglang_adapt.memory.free import FreeMemory
    from sglang_adapt.upstream.weights.sizes import ModelSizes


@dataclass(frozen=True)
class Deployment:
    """What a plan depends on, but for the number of KV tokens and the TP sizes.

    Attributes:
        gpus: free memory of each GPU; of virtual GPUs one entry, the host's.
        gpu_count: GPUs, real or virtual.
        virtual: True if they are virtual.
        sizes: the model's, for every TP size.
        graph_batch: largest batch of a CUDA graph by TP size; 0 without.
        overheads: all measured ones; later ones count.
        share: as in `policy.memory_plan.plan_memory`.
        page: tokens of a page at the smallest TP size.
        kv_shape: of the KV pool that the engines of a GPU share; None with a single TP size.
        kv_copy: the way of KV from GPU to GPU.
    """

    gpus: tuple[FreeMemory, ...]
    gpu_count: int
    virtual: bool
    sizes: ModelSizes
    graph_batch: dict[int, int]
    overheads: tuple[Overhead, ...]
    share: float
    page: int
    kv_shape: KvShape | None
    kv_copy: CopyPath = CopyPath.PEER


def plan_for(deployment: Deployment, tp_sizes: Sequence[int], tokens: int | None) -> MemoryPlan:
    """The plan for warm engines of some TP sizes and `tokens` tokens of KV (None: what is left).

    Several TP sizes have one KV pool on each GPU, of so many tokens of the smallest size. An engine of a single one
    has stock's own pool, which stock sizes on real GPUs without `tokens`.

    Raises:
        GeometryError: the TP sizes can have no such pool.
    """
    groups = [list(range(deployment.gpu_count))] if deployment.virtual else [[n] for n in range(deployment.gpu_count)]
    kv = kv_cost(deployment, tp_sizes)
    if tokens is not None and len(tp_sizes) > 1:
        tokens = tokens // deployment.page * deployment.page
    places = [
        _place(deployment, free, group, tp_sizes, kv) for free, group in zip(deployment.gpus, groups, strict=True)
    ]
    alone = len(tp_sizes) == 1 and not deployment.virtual
    return plan_memory(places, tokens, deployment.share, deployment.page, kv.least_tokens, leave_to_stock=alone)


def plans_for_fewer(deployment: Deployment, tp_sizes: Sequence[int]) -> Mapping[tuple[int, ...], MemoryPlan]:
    """Plans for the sets of fewer TP sizes that can have a pool, in the order in which they are to be tried."""
    plans = {}
    for fewer in fewer_tp_sizes(tp_sizes):
        try:
            plans[fewer] = plan_for(deployment, fewer, None)
        except GeometryError:
            # Not with pages of this size: no way out to name.
            continue
    return plans


def fewer_tp_sizes(tp_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Smaller sets of TP sizes to try, those with most sizes first, then those with the larger sizes."""
    sets = [tuple(sorted(tp_sizes)[start:]) for start in range(1, len(tp_sizes))]
    return sorted(sets, key=len, reverse=True)


def kv_cost(deployment: Deployment, tp_sizes: Sequence[int]) -> PoolCost:
    """What KV takes of each GPU: the one pool of several TP sizes, or the pool of the one engine on it.

    Raises:
        GeometryError: the TP sizes can have no such pool.
        ValueError: several TP sizes, and `kv_shape` is not known.
    """
    if len(tp_sizes) == 1:
        return PoolCost(0, deployment.sizes.kv_bytes_per_token[tp_sizes[0]], deployment.page)
    if deployment.kv_shape is None:
        raise ValueError(f"the KV pool of TP sizes {tuple(tp_sizes)} needs the shapes of the model's KV")
    return pool_cost(deployment.kv_shape, tuple(tp_sizes), deployment.page, WARMUP)


def read_all_overheads(user_file: Path) -> tuple[Overhead, ...]:
    """The packaged figures and then the user's. Raises OverheadsFileError."""
    return read_overheads(PACKAGED) + read_overheads(user_file)


def _place(
    deployment: Deployment, free: FreeMemory, gpus: Sequence[int], tp_sizes: Sequence[int], kv: PoolCost
) -> Place:
    """A GPU, or the host with all virtual GPUs."""
    gpu = VIRTUAL_GPU if deployment.virtual else free.name
    sizes = deployment.sizes
    charges = []
    if len(tp_sizes) > 1:
        parts = nesting(tp_sizes)
        # Of virtual GPUs those that have the same part share it.
        copies = parts if deployment.virtual else 1
        what = "weights" if copies == parts else f"weights (1 of {parts} parts)"
        charges.append(Charge(what, copies * sizes.store_bytes[parts]))
        what = "keeper" if copies == 1 else f"{copies} keepers"
        charges.append(_charge(deployment, what, OverheadKey(gpu, "", None, 0), copies))
    else:
        charges.append(Charge("weights", len(gpus) * sizes.rank_bytes[tp_sizes[0]]))
    # Every warm TP size has one rank on each GPU.
    for tp in tp_sizes:
        what = f"{len(gpus)} ranks of TP {tp}" if deployment.virtual else f"TP {tp} engine"
        key = OverheadKey(gpu, sizes.shape, tp, deployment.graph_batch[tp])
        charges.append(_charge(deployment, what, key, len(gpus)))
    if len(tp_sizes) > 1 and deployment.kv_copy is CopyPath.STAGED:
        charges.append(Charge("buffers for KV", len(gpus) * _staging_bytes(deployment, tp_sizes)))
    name = "host memory" if deployment.virtual else f"GPU {gpus[0]} ({free.name})"
    if kv.fixed_bytes:
        charges.append(Charge("KV of idle engines", len(gpus) * kv.fixed_bytes))
    return Place(name, free.free_bytes, tuple(charges), len(gpus) * kv.token_bytes)


def _staging_bytes(deployment: Deployment, tp_sizes: Sequence[int]) -> int:
    """What the staged path takes of a GPU: two buffers of its keeper, and two of each rank; of a virtual one, two of
    its keeper and two link buffers, which real ones have in host memory."""
    assert deployment.kv_shape is not None, "several TP sizes have a pool"
    least = kv_cost(deployment, tp_sizes).least_tokens
    geometry = size_pool(deployment.kv_shape, tuple(tp_sizes), deployment.page, least, WARMUP).geometry
    size = buffer_bytes(geometry.planes, geometry.block_bytes, virtual=deployment.virtual)
    return BUFFERS * size * (2 if deployment.virtual else 1 + len(tp_sizes))


def _charge(deployment: Deployment, what: str, key: OverheadKey, count: int = 1) -> Charge:
    estimate = estimate_overhead(deployment.overheads, key)
    why = "" if estimate.exact else f"assumed for {key}: as measured for {estimate.measured_for}"
    return Charge(what, count * estimate.nbytes, why)
