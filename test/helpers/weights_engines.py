"""Stock engines on virtual GPUs in processes forked from one that has loaded sglang: a second each, not twenty."""

from __future__ import annotations

import io
import json
import multiprocessing.forkserver
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sglang_adapt.weights import WeightsHandle

PRELOADED = ["sglang_adapt.upstream.preload"]
_LIMIT_S = 120


def forkserver() -> ForkServerContext:
    """Its processes are forked from one that has loaded sglang, the same one for all tests of this process."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._preload_modules != PRELOADED:
        # One that other tests have used has loaded nothing.
        server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def server_args_of(model: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a small float32 engine."""
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": 4000,
        "max_running_requests": 16,
        "sleep_on_idle": True,
        "log_level": "warning",
        "disable_radix_cache": True,
        **changes,
    }


@dataclass(frozen=True)
class Output:
    """What one prompt gave."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class EngineCase:
    """A stock engine to start.

    Attributes:
        server_args: keyword arguments of stock's Engine.
        weights: the stores to run on, of equal parts of the weights; None for an engine that loads its own.
        ignore_block_order: read fused outputs as if they were in stock order (to see that it matters).
        sp_tokens: tokens of a batch from which it runs sequence-parallel; None for an engine that cannot.
        base_tp: TP size whose shards of the weights such a batch runs on.
    """

    server_args: dict[str, Any]
    weights: WeightsHandle | tuple[WeightsHandle, ...] | None = None
    ignore_block_order: bool = False
    sp_tokens: int | None = None
    base_tp: int = 1


@dataclass
class EngineProcess:
    """A running engine; `call` runs a function of it in its process."""

    process: Any
    pipe: Connection

    @classmethod
    def start(cls, context: ForkServerContext, case: EngineCase) -> EngineProcess:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(case, theirs))
        process.start()
        theirs.close()
        return cls(process, ours)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(engine, *args)`, a function of a module, in the engine's process."""
        self.pipe.send((function, args))
        if not self.pipe.poll(_LIMIT_S):
            raise TimeoutError(f"no answer from the engine within {_LIMIT_S} s")
        is_result, value = self.pipe.recv()
        if not is_result:
            raise RuntimeError(f"in the engine's process:\n{value}")
        return value

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[Output]:
        return self.call(generate, prompts, new_tokens)

    def pids(self) -> list[int]:
        """Process ids of the engine's ranks."""
        return self.call(_rank_pids)

    def run_sequences(self, tokens: int | None, at_random: bool = False) -> None:
        """From now on batches of `tokens` tokens run sequence-parallel, or each batch or none at random."""
        self.call(_rpc, "set_sp", {"tokens": tokens, "at_random": at_random})

    def batches(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank says of its batches (`SequenceMode.said`)."""
        self.call(_rpc, "write_sp", {"folder": str(folder)})
        return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]

    def update_weights(self, path: Path) -> tuple[bool, str]:
        """Ask for an online update from a checkpoint; returns success and the message."""
        return self.call(_update_weights, str(path))

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve(case: EngineCase, pipe: Connection) -> None:
    import multiprocessing as mp

    from sglang.srt.entrypoints.engine import Engine

    from sglang_adapt.upstream.rank import prepare_process

    prepare_process()
    os.setsid()

    class ForkedEngine(Engine):
        run_scheduler_process_func = staticmethod(
            partial(run_scheduler, case.weights, case.ignore_block_order, case.sp_tokens, case.base_tp)
        )

    mp.set_start_method("fork", force=True)
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
                    engine = ForkedEngine(**case.server_args)
                    stack.callback(engine.shutdown)
                pipe.send((True, function(engine, *args)))
            except Exception:  # noqa: BLE001 -- it is told, and raised there
                pipe.send((False, traceback.format_exc()))


def run_scheduler(
    weights: WeightsHandle | tuple[WeightsHandle, ...] | None,
    ignore_block_order: bool,
    sp_tokens: int | None,
    base_tp: int,
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stock's scheduler process, on shared weights if there are any."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    from sglang_adapt.upstream.patch import PATCHES
    from sglang_adapt.upstream.weights import bind
    from sglang_adapt.upstream.weights.attach import KeepHeadCounts, use_store

    if weights is not None:
        stores = (weights,) if isinstance(weights, WeightsHandle) else weights
        use_store(stores[tp_rank * len(stores) // server_args.tp_size], sp_tokens, base_tp)
        Scheduler.set_sp, Scheduler.write_sp = _set_sp, _write_sp
    else:
        PATCHES.apply(KeepHeadCounts)
    if ignore_block_order:
        bind.read_block_order = lambda model, finest_tp: bind.BlockOrderReport()
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)


def _set_sp(scheduler: Any, tokens: int | None, at_random: bool) -> None:
    from sglang_adapt.upstream.sequence.mode import current_mode

    mode = current_mode()
    assert mode is not None
    mode.set_threshold(tokens)
    if at_random:
        # The same on all ranks: they have run the same batches.
        mode.wants = lambda tokens: random.Random(mode.batches.total()).random() < 0.5


def _write_sp(scheduler: Any, folder: str) -> None:
    from sglang_adapt.upstream.sequence.mode import current_mode

    mode = current_mode()
    assert mode is not None
    (Path(folder) / f"rank{scheduler.ps.tp_rank}.json").write_text(json.dumps(mode.said()))
    torch.distributed.barrier(group=scheduler.tp_group.cpu_group)


def _rpc(engine: Any, method: str, arguments: dict[str, Any]) -> None:
    """Call a method of all ranks' schedulers, between the same two batches."""
    engine.collective_rpc(method, **arguments)


def generate(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[Output]:
    results = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
    )
    return [
        Output(result["output_ids"], [token[0] for token in result["meta_info"]["output_token_logprobs"]])
        for result in results
    ]


def _update_weights(engine: Any, path: str) -> tuple[bool, str]:
    success, message, *_ = engine.update_weights_from_disk(path)
    return success, message


def _rank_pids(engine: Any) -> list[int]:
    import psutil

    return [
        child.pid for child in psutil.Process().children(recursive=True) if "scheduler" in " ".join(child.cmdline())
    ]


def in_child(context: ForkServerContext, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a function of a module, in a process that has loaded sglang and its patches.

    Raises RuntimeError with the type and text of what it raised.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(function, args, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT_S):
            raise TimeoutError(f"{function.__name__} did not end within {_LIMIT_S} s")
        is_result, value = ours.recv()
    finally:
        process.kill()
        process.join()
    if not is_result:
        raise RuntimeError(value)
    return value


def said_by(module: str, *arguments: str) -> tuple[int, str]:
    """In a process that has loaded sglang: exit code and output of `python -m module arguments`."""
    output = io.StringIO()
    sys.argv = [module, *arguments]
    with redirect_stdout(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, output.getvalue()


def _call(function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    from sglang_adapt.upstream.rank import prepare_process

    prepare_process()
    try:
        pipe.send((True, function(*args)))
    except Exception as error:  # noqa: BLE001 -- it is told, and raised there
        pipe.send((False, f"{type(error).__name__}: {error}"))
