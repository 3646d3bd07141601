"""Stock engines whose KV lies in shared regions, each forked from a process that has loaded sglang."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import torch
from weights_engines import EngineProcess, Output, generate

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.memory import RegionHandle, attach

_LIMIT_S = 60
_answers: list[Connection] = []


@dataclass(frozen=True)
class KvCase:
    """An engine to start: for each rank the handle of its GPU's region, and its first lease."""

    name: str
    server_args: dict[str, Any]
    geometry: PoolGeometry
    handles: tuple[RegionHandle, ...]
    pages: tuple[tuple[int, ...], ...]

    @property
    def tp(self) -> int:
        return len(self.handles)


class KvEngine(EngineProcess):
    """A running engine on a shared region."""

    @classmethod
    def launch(cls, context: ForkServerContext, case: KvCase) -> KvEngine:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(case, theirs))
        process.start()
        theirs.close()
        return cls(process, ours)

    def on_ranks(self, function: Callable[..., Any], *args_by_rank: Any) -> list[Any]:
        """`function(scheduler, *args)` in every rank, in the same iteration; `args_by_rank` has a list for each
        argument, an entry for each rank. Returns what each rank returned, or raises what one said."""
        return self.call(_on_ranks, f"{function.__module__}:{function.__name__}", [list(arg) for arg in args_by_rank])

    def generate_when_there_is_room(self, prompt: list[int], new_tokens: int, pages: list[list[int]]) -> Output:
        """Send a prompt that the lease is too small for, and let the lease grow when the prompt is held up.

        Args:
            pages: blocks of each rank by which the lease grows.
        """
        return self.call(_generate_when_there_is_room, prompt, new_tokens, pages)

    def generate_while_pages_go(self, prompt: list[int], new_tokens: int) -> tuple[Output, int]:
        """Send a prompt, take all free pages away while it runs, and give them back when the rest is used up.

        Returns:
            What came of it, and the pages that were taken away on each rank.
        """
        return self.call(_generate_while_pages_go, prompt, new_tokens)


def region_view(tensor: torch.Tensor, geometry: PoolGeometry, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A region from the bytes of a `memory.Region`."""
    return tensor[: geometry.region_bytes].view(dtype).view(geometry.region_shape)


def _serve(case: KvCase, pipe: Connection) -> None:
    import multiprocessing as mp

    from sglang.srt.entrypoints.engine import Engine

    from sglang_adapt.upstream.kv_pool import pool_server_args
    from sglang_adapt.upstream.rank import prepare_process

    prepare_process()
    os.setsid()
    mp.set_start_method("fork", force=True)
    pairs = [mp.Pipe() for _ in case.handles]
    _answers.extend(ours for ours, _ in pairs)

    class ForkedEngine(Engine):
        run_scheduler_process_func = staticmethod(partial(_run_scheduler, case, [theirs for _, theirs in pairs]))

    with ExitStack() as stack:
        stack.enter_context(mock.patch("multiprocessing.set_start_method"))
        engine = None
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                break
            try:
                if engine is None:
                    engine = ForkedEngine(
                        **case.server_args, tp_size=case.tp, **pool_server_args(case.geometry, case.tp)
                    )
                    stack.callback(engine.shutdown)
                pipe.send((True, function(engine, *args)))
            except Exception:  # noqa: BLE001 -- it is told, and raised there
                pipe.send((False, traceback.format_exc()))


def _run_scheduler(
    case: KvCase, answers: list[Connection], server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any
) -> None:
    """Stock's scheduler process on this rank's region."""
    from pkgutil import resolve_name

    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    from sglang_adapt.upstream.kv_pool import use_pool
    from sglang_adapt.upstream.patch import PATCHES
    from sglang_adapt.upstream.weights.attach import KeepHeadCounts

    PATCHES.apply(KeepHeadCounts)
    region = attach(case.handles[tp_rank], "write")
    use_pool(case.name, case.geometry, case.tp, region_view(region.tensor, case.geometry), case.pages[tp_rank])

    def on_rank(scheduler: Any, name: str, args: str) -> None:
        try:
            result = resolve_name(name)(scheduler, *(by_rank[tp_rank] for by_rank in json.loads(args)))
        except RuntimeError as error:
            result = error
        answers[tp_rank].send(result)

    Scheduler.on_rank = on_rank  # type: ignore[attr-defined]
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest)


def _on_ranks(engine: Any, name: str, args: list[list[Any]]) -> list[Any]:
    engine.collective_rpc("on_rank", name=name, args=json.dumps(args))  # stock carries plain values only
    results = []
    for answer in _answers:
        if not answer.poll(_LIMIT_S):
            raise TimeoutError(f"no answer from a rank within {_LIMIT_S} s")
        results.append(answer.recv())
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _generate_when_there_is_room(engine: Any, prompt: list[int], new_tokens: int, pages: list[list[int]]) -> Output:
    outputs: list[Output] = []
    thread = threading.Thread(target=lambda: outputs.extend(generate(engine, [prompt], new_tokens)), daemon=True)
    thread.start()
    deadline = time.monotonic() + _LIMIT_S
    while not all(_on_ranks(engine, f"{__name__}:is_held_up", [])):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the request was not held up within {_LIMIT_S} s")
    _on_ranks(engine, f"{__name__}:grow", [pages])
    thread.join(_LIMIT_S)
    if not outputs:
        raise TimeoutError(f"the request did not go on within {_LIMIT_S} s after the lease had grown")
    return outputs[0]


def _generate_while_pages_go(engine: Any, prompt: list[int], new_tokens: int) -> tuple[Output, int]:
    outputs: list[Output] = []
    thread = threading.Thread(target=lambda: outputs.extend(generate(engine, [prompt], new_tokens)), daemon=True)
    thread.start()
    _until(engine, "runs", thread)
    given = _on_ranks(engine, f"{__name__}:give_all_back", [])
    _until(engine, "is_held_up", thread)
    _on_ranks(engine, f"{__name__}:grow", [given])
    thread.join(_LIMIT_S)
    if not outputs:
        raise TimeoutError(f"the request did not go on within {_LIMIT_S} s after the lease had grown")
    return outputs[0], len(given[0])


def _until(engine: Any, name: str, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not all(_on_ranks(engine, f"{__name__}:{name}", [])):
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"{name}: the request has ended, or it took more than {_LIMIT_S} s")


# -- functions for `on_ranks`


def runs(scheduler: Any) -> bool:
    """Does a request decode?"""
    return len(scheduler.running_batch.reqs) > 0


def give_all_back(scheduler: Any) -> list[int]:
    from sglang_adapt.upstream.kv_lease import EngineLease

    lease = EngineLease.of(scheduler)
    return lease.give_back(lease.spare_pages).tolist()


def is_held_up(scheduler: Any) -> bool:
    """Does a request wait for room while none runs?"""
    return bool(scheduler.waiting_queue) and scheduler.running_batch.batch_is_full


def grow(scheduler: Any, pages: list[int]) -> None:
    from sglang_adapt.upstream.kv_lease import EngineLease

    EngineLease.of(scheduler).grow(pages)


def give_back(scheduler: Any, count: int) -> list[int]:
    from sglang_adapt.upstream.kv_lease import EngineLease

    return EngineLease.of(scheduler).give_back(count).tolist()


@dataclass(frozen=True)
class LeaseState:
    """What a rank has: its lease, how many of its pages are free, cached tokens, the pool's size and usage."""

    leased: list[int]
    free: int
    cached_tokens: int
    capacity: int
    used_tokens: int
    usage: float


def lease_state(scheduler: Any) -> LeaseState:
    from sglang_adapt.upstream.kv_lease import EngineLease

    lease = EngineLease.of(scheduler)
    lease.check()
    stats = scheduler.pool_stats_observer.get_pool_stats()
    return LeaseState(
        lease.pages.ids().tolist(),
        lease.free_pages,
        scheduler.tree_cache.evictable_size(),
        scheduler.max_total_num_tokens,
        stats.full_num_used,
        stats.full_token_usage,
    )
