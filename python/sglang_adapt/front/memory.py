"""The memory plan of a deployment: what the pure part (`policy.memory_plan`) is told of GPUs, model and overheads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_adapt.core.overheads import PACKAGED, VIRTUAL_GPU, Overhead, OverheadKey, read_overheads
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
        share, page: as in `policy.memory_plan.plan_memory`.
    """

    gpus: tuple[FreeMemory, ...]
    gpu_count: int
    virtual: bool
    sizes: ModelSizes
    graph_batch: dict[int, int]
    overheads: tuple[Overhead, ...]
    share: float
    page: int


def plan_for(deployment: Deployment, tp_sizes: Sequence[int], tokens: int | None) -> MemoryPlan:
    """The plan for warm engines of some TP sizes, each with a KV pool of `tokens` tokens (None: what is left).

    A single TP size on real GPUs without `tokens` is left to stock: then there is one engine a GPU.
    """
    groups = [list(range(deployment.gpu_count))] if deployment.virtual else [[n] for n in range(deployment.gpu_count)]
    places = [_place(deployment, free, group, tp_sizes) for free, group in zip(deployment.gpus, groups, strict=True)]
    alone = len(tp_sizes) == 1 and not deployment.virtual
    return plan_memory(places, tokens, deployment.share, deployment.page, leave_to_stock=alone)


def fewer_tp_sizes(tp_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Smaller sets of TP sizes to try, those with most sizes first, then those with the larger sizes."""
    sets = [tuple(sorted(tp_sizes)[start:]) for start in range(1, len(tp_sizes))]
    return sorted(sets, key=len, reverse=True)


def kv_bytes_per_token(sizes: ModelSizes, tp_sizes: Sequence[int]) -> int:
    """Bytes on a GPU for each token of `--max-total-tokens`: each warm engine has a pool of its own."""
    return sum(sizes.kv_bytes_per_token[tp] for tp in tp_sizes)


def read_all_overheads(user_file: Path) -> tuple[Overhead, ...]:
    """The packaged figures and then the user's. Raises OverheadsFileError."""
    return read_overheads(PACKAGED) + read_overheads(user_file)


def _place(deployment: Deployment, free: FreeMemory, gpus: Sequence[int], tp_sizes: Sequence[int]) -> Place:
    """A GPU, or the host with all virtual GPUs."""
    gpu = VIRTUAL_GPU if deployment.virtual else free.name
    sizes = deployment.sizes
    charges = []
    if len(tp_sizes) > 1:
        charges.append(Charge("weights", sizes.store_bytes))
        charges.append(_charge(deployment, "keeper", OverheadKey(gpu, "", None, 0)))
    else:
        charges.append(Charge("weights", len(gpus) * sizes.rank_bytes[tp_sizes[0]]))
    # Every warm TP size has one rank on each GPU.
    for tp in tp_sizes:
        what = f"{len(gpus)} ranks of TP {tp}" if deployment.virtual else f"TP {tp} engine"
        key = OverheadKey(gpu, sizes.shape, tp, deployment.graph_batch[tp])
        charges.append(_charge(deployment, what, key, len(gpus)))
    name = "host memory" if deployment.virtual else f"GPU {gpus[0]} ({free.name})"
    return Place(name, free.free_bytes, tuple(charges), len(gpus) * kv_bytes_per_token(sizes, tp_sizes))


def _charge(deployment: Deployment, what: str, key: OverheadKey, count: int = 1) -> Charge:
    estimate = estimate_overhead(deployment.overheads, key)
    why = "" if estimate.exact else f"assumed for {key}: as measured for {estimate.measured_for}"
    return Charge(what, count * estimate.nbytes, why)
