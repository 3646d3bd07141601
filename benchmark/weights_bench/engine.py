"""One stock engine in a process of its own, with its own weights or on a keeper's, told what to do over a pipe."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from sglang_adapt.core.process import process_context
from sglang_adapt.weights import WeightsHandle

_END_S = 30
_STAGES = (
    "init_torch_distributed",
    "load_model",
    "alloc_memory_pool",
    "init_attention_backends",
    "init_cuda_graphs",
)


@dataclass(frozen=True)
class EngineSpec:
    """An engine to start.

    Attributes:
        name: for messages and files, e.g. "shared tp2".
        server_args: keyword arguments of stock's Engine.
        weights: by GPU id, the store to run on; None for an engine that makes its own (synthetic) weights.
        start_method: multiprocessing's, for the ranks.
        folder: where the ranks write their process ids, and what memory they use.
    """

    name: str
    server_args: dict[str, Any]
    weights: dict[int, WeightsHandle] | None
    start_method: str
    folder: Path

    def report(self, rank: int) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}-{rank}.json"

    def pid_file(self, rank: int) -> Path:
        return self.report(rank).with_suffix(".pid")


class Engine:
    """A running engine."""

    def __init__(self, spec: EngineSpec, limit: Callable[[], float]) -> None:
        """Start it; `limit` gives the seconds that any wait may still take."""
        self.spec = spec
        self._limit = limit
        context: Any = multiprocessing.get_context(spec.start_method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, theirs), name=spec.name)
        self._process.start()
        theirs.close()
        self.start_s: float | None = None

    def wait_started(self) -> float:
        """Seconds from the start of its process until it serves."""
        self.start_s = self._answer()
        return self.start_s

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(engine, *args)` in the engine's process."""
        self._pipe.send((function, args))
        return self._answer()

    def send(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Begin a call; the result of this is called for its result."""
        self._pipe.send((function, args))
        return self._answer

    def memory(self) -> list[dict[str, Any]]:
        """What each rank said of its memory when it had started."""
        ranks = self.spec.server_args["tp_size"]
        return [json.loads(self.spec.report(rank).read_text()) for rank in range(ranks)]

    def stop(self) -> None:
        """End the engine and all its processes, and wait until they are gone."""
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        # A forkserver's ranks are the forkserver's children, and of its process group.
        files = [self.spec.pid_file(rank) for rank in range(self.spec.server_args["tp_size"])]
        end_processes([int(file.read_text()) for file in files if file.exists()])

    def _answer(self) -> Any:
        if not self._pipe.poll(max(1.0, self._limit())):
            raise TimeoutError(f"{self.spec.name}: no answer within the time that is left")
        try:
            is_result, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.spec.name}: its process has ended") from None
        if not is_result:
            raise RuntimeError(f"{self.spec.name}:\n{value}")
        return value


def end_processes(pids: Sequence[int]) -> None:
    """Kill what of these processes still runs, and wait until it is gone. Raises TimeoutError."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
            processes[-1].kill()
    _, alive = psutil.wait_procs(processes, timeout=_END_S)
    if alive:
        raise TimeoutError(f"processes {[process.pid for process in alive]} did not end within {_END_S} s of SIGKILL")


def serve(spec: EngineSpec, pipe: Connection) -> None:
    """The engine's process."""
    os.setsid()
    began = time.monotonic()
    engine = None
    try:
        engine = _start(spec)
        pipe.send((True, time.monotonic() - began))
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(engine, *args)))
            except Exception:  # noqa: BLE001 -- told to the benchmark, which raises it
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        return
    except Exception:  # noqa: BLE001 -- told to the benchmark, which raises it
        pipe.send((False, traceback.format_exc()))
    finally:
        if engine is not None:
            engine.shutdown()
        os.killpg(0, signal.SIGKILL)


def _start(spec: EngineSpec) -> Any:
    from sglang.srt.entrypoints.engine import Engine as StockEngine

    from sglang_adapt.upstream.rank import prepare_process
    from sglang_adapt.upstream.weights.synthetic import SyntheticLoader

    prepare_process()

    class BenchEngine(StockEngine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, spec))

    process_context(spec.start_method)
    multiprocessing.set_start_method(spec.start_method, force=True)
    args = spec.server_args | ({"load_format": SyntheticLoader} if spec.weights is None else {})
    # Stock sets multiprocessing to spawn, which would import sglang once more in every rank.
    with mock.patch("multiprocessing.set_start_method"):
        return BenchEngine(**args)


def run_scheduler(spec: EngineSpec, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any) -> None:
    """A rank's process: stock's scheduler, on the keeper's weights if there are any."""
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import run_scheduler_process

    from sglang_adapt.upstream.cuda_facts import give_back_cuda
    from sglang_adapt.upstream.patch import PATCHES
    from sglang_adapt.upstream.rank import prepare_process
    from sglang_adapt.upstream.weights.attach import KeepHeadCounts, use_store

    spec.pid_file(tp_rank).write_text(str(os.getpid()))
    give_back_cuda()
    prepare_process()
    envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.set(False)
    if spec.weights is not None:
        use_store(spec.weights[gpu_id])
    else:
        PATCHES.apply(KeepHeadCounts)
    _report_memory(spec.report(tp_rank), server_args.device, gpu_id)
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest)


def _report_memory(path: Path, device: str, gpu_id: int) -> None:
    """Write, when the scheduler is up, how much memory each stage of its start has taken.

    Stages are told by the GPU's free memory before and after, so that nothing else may start on it meanwhile.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    stages: dict[str, float] = {}

    def free_mib() -> float:
        return torch.cuda.mem_get_info(gpu_id)[0] / 2**20 if device == "cuda" else 0.0

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            before, began = free_mib(), time.monotonic()
            result = original(self, *args, **kwargs)
            stages[f"{name} MiB"] = round(before - free_mib(), 1)
            stages[f"{name} s"] = round(time.monotonic() - began, 2)
            return result

        return wrapper

    for name in _STAGES:
        setattr(ModelRunner, name, timed(name, getattr(ModelRunner, name)))
    run_event_loop = Scheduler.run_event_loop

    def write_and_run(self: Any) -> None:
        facts: dict[str, Any] = {"stages": stages}
        if device == "cuda":
            pools: dict[str, float] = {}
            for segment in torch.cuda.memory_snapshot():
                kind = "default pool" if segment["segment_pool_id"] == (0, 0) else "graph pools"
                pools[kind] = pools.get(kind, 0.0) + segment["total_size"] / 2**20
            facts["torch MiB"] = {
                "allocated": round(torch.cuda.memory_allocated() / 2**20, 1),
                "reserved": round(torch.cuda.memory_reserved() / 2**20, 1),
                **{kind: round(size, 1) for kind, size in pools.items()},
            }
        path.write_text(json.dumps(facts))
        run_event_loop(self)

    Scheduler.run_event_loop = write_and_run
