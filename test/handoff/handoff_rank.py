"""One rank of an engine of the tests: stock's scheduler on a shared region, with the hand-off and a lease to call."""

from __future__ import annotations

import traceback
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from sglang_adapt.core.handoff import ExportCall, decode_call
from sglang_adapt.kv.geometry import PoolGeometry


@dataclass(frozen=True)
class RankCase:
    """What a rank starts with: its engine's name, its GPU's region and its first lease."""

    engine: str
    geometry: PoolGeometry
    tp: int
    region: torch.Tensor
    pages: list[int]


@dataclass(frozen=True)
class RankState:
    """What a rank has when nothing of it runs: see `check_idle`."""

    leased: list[int]
    free: int
    cached: int
    slots: int


def run_rank(case: RankCase, answers: Connection, ready: Connection, *args: Any) -> None:
    """Stock's scheduler process. `Scheduler.adapt_call(name, message)` calls a function of this module, or
    `EngineHandoff.call`, on all ranks at once; what it returns goes to `answers`."""
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    from sglang_adapt.engine.handoff import EngineHandoff
    from sglang_adapt.upstream.handoff.patches import HANDOFF_PATCHES
    from sglang_adapt.upstream.kv_pool import use_pool
    from sglang_adapt.upstream.rank import prepare_process
    from sglang_adapt.upstream.weights.attach import KeepHeadCounts

    torch.set_num_threads(1)
    prepare_process(KeepHeadCounts, *HANDOFF_PATCHES)
    envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.set(1)
    envs.SGLANG_CHECK_KV_PAGE_INVARIANTS.set(True)
    use_pool(case.engine, case.geometry, case.tp, case.region, case.pages)
    handoff: list[EngineHandoff] = []

    def adapt_call(scheduler: Any, name: str, message: str) -> None:
        if not handoff:
            handoff.append(EngineHandoff(scheduler))
        functions: dict[str, Callable[..., Any]] = {"grow": grow, "give_back": give_back, "idle_state": idle_state}
        functions |= {"is_prefilling": is_prefilling, "fail_next_prepare": fail_next_prepare, "flush": flush}
        functions |= {"refuse": refuse, "few_slots": few_slots}
        try:
            if name == "handoff":
                data = b64decode(message)
                result: Any = handoff[0].call(data)
                if isinstance(decode_call(data), ExportCall):
                    _send_fence(scheduler)
            else:
                result = functions[name](scheduler, message, case)
            answers.send((True, result))
        except Exception as error:  # noqa: BLE001 -- it is told, and raised by the test
            answers.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))

    Scheduler.adapt_call = adapt_call  # type: ignore[attr-defined]
    run_scheduler_process(*args, ready)


def _send_fence(scheduler: Any) -> None:
    """A message behind all outputs that were sent so far."""
    from sglang.srt.managers.io_struct import RpcReqOutput

    scheduler.ipc_channels.send_to_detokenizer.send_output(RpcReqOutput(success=True, message="fence"))


def _pages(message: str, scheduler: Any) -> list[int]:
    import json

    return json.loads(message)[scheduler.ps.tp_rank]


def grow(scheduler: Any, message: str, case: RankCase) -> None:
    from sglang_adapt.upstream.kv_lease import EngineLease

    EngineLease.of(scheduler).grow(_pages(message, scheduler))


def give_back(scheduler: Any, message: str, case: RankCase) -> list[int]:
    """Gives up all that no request holds, or `message` pages of it."""
    from sglang_adapt.upstream.kv_lease import EngineLease

    lease = EngineLease.of(scheduler)
    room = lease.free_pages + scheduler.tree_cache.evictable_size() // scheduler.page_size
    return lease.give_back(int(message) if message else room).tolist()


def is_prefilling(scheduler: Any, message: str, case: RankCase) -> bool:
    return scheduler.chunked_req is not None


def few_slots(scheduler: Any, message: str, case: RankCase) -> None:
    """Hides all but `message` free request slots from the next adopt."""
    from sglang_adapt.upstream.handoff import adopt as adopting

    original, pool = adopting.adopt, scheduler.req_to_token_pool

    def adopt(*args: Any, **kwargs: Any) -> Any:
        adopting.adopt = original
        hidden, pool.free_slots = pool.free_slots[int(message) :], pool.free_slots[: int(message)]
        try:
            return original(*args, **kwargs)
        finally:
            pool.free_slots += hidden

    adopting.adopt = adopt


def fail_next_prepare(scheduler: Any, message: str, case: RankCase) -> None:
    """Makes the next adopt fail on one rank, at its last check."""
    from sglang_adapt.kv.adaptor import LeasePages

    if scheduler.ps.tp_rank != int(message):
        return
    original = LeasePages.require_addable

    def fail(self: Any, pages: Any) -> Any:
        LeasePages.require_addable = original  # type: ignore[method-assign]
        raise RuntimeError("made to fail")

    LeasePages.require_addable = fail  # type: ignore[method-assign]


def refuse(scheduler: Any, message: str, case: RankCase) -> None:
    """Gives the request `message` a sign that keeps it from being carried, or takes all such signs away."""
    from sglang_adapt.upstream.handoff.quiesce import requests_of

    for req in requests_of(scheduler):
        req.hisparse_staging = req.rid == message


def flush(scheduler: Any, message: str, case: RankCase) -> bool:
    return scheduler.flush_cache()


def idle_state(scheduler: Any, message: str, case: RankCase) -> RankState:
    """What the rank has; raises unless every page of its lease is free or cached, no request is left, and no lock."""
    from sglang_adapt.upstream.handoff.quiesce import drain, requests_of
    from sglang_adapt.upstream.kv_lease import EngineLease

    drain(scheduler)
    left = [req.rid for req in requests_of(scheduler)]
    if left:
        raise RuntimeError(f"{case.engine} still has {left}")
    lease = EngineLease.of(scheduler)
    lease.check()
    tree, pool = scheduler.tree_cache, scheduler.req_to_token_pool
    cached_pages = [
        page // scheduler.page_size
        for page in ([] if tree.is_chunk_cache() or not tree.total_size() else tree.all_values_flatten().tolist())
    ]
    owned = sorted({*cached_pages, *lease._free().tolist()})
    leased = lease.pages.ids().tolist()
    if owned != leased or tree.protected_size() or len(pool.free_slots) != pool.size:
        raise RuntimeError(
            f"{case.engine}: leased {leased}, free or cached {owned}; {tree.protected_size()} tokens locked, "
            f"{len(pool.free_slots)} of {pool.size} slots free"
        )
    if len(lease._free()) + len(set(cached_pages)) != len(leased):
        raise RuntimeError(f"{case.engine}: a page is both free and cached")
    return RankState(leased, lease.free_pages, tree.evictable_size(), len(pool.free_slots))
