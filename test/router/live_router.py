"""The router's process in a thread of the test: real keepers and engines, and the test in the front's place."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import zmq
from weights_engines import forkserver as preloaded

from sglang_adapt.core import messages
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.front.settings import make_settings
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.process import _Process
from sglang_adapt.router.sockets import make_socket
from sglang_adapt.upstream import wire

Result = TypeVar("Result")
LIMIT_S = 120


class LiveRouter:
    """A running router. Its coroutines are called from the test's thread."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        from sglang.srt.server_args import PortArgs

        preloaded()
        forkserver.ensure_running()
        settings = make_settings(flags, str(run_dir), "forkserver")
        args = settings.server_args[settings.config.tp_sizes[0]]
        ports = PortArgs.init_new(args)
        for name in ("tokenizer", "scheduler_input", "detokenizer"):
            setattr(ports, f"{name}_ipc_name", f"ipc://{run_dir / name}")
        control = f"ipc://{run_dir / 'control'}"
        self._context = zmq.Context()
        self._front = make_socket(self._context, zmq.PUSH, ports.scheduler_input_ipc_name, bind=True)
        self._outputs = make_socket(self._context, zmq.PULL, ports.detokenizer_ipc_name, bind=True)
        self._control = make_socket(self._context, zmq.PAIR, control, bind=True)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self.process = _Process(
            RouterArgs(settings.config, settings.server_args, ports, control, dict(os.environ), settings.pool), theirs
        )
        self.candidates = settings.config.candidates
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        if not ours.poll(LIMIT_S):
            self.close()
            raise TimeoutError(f"the engines are not ready after {LIMIT_S} s")
        report = ours.recv()
        assert report["status"] == "ready", report

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self.process.run()

        asyncio.run(main())

    @property
    def pools(self) -> Pools:
        assert self.process.pools is not None
        return self.process.pools

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the router's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def here(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in the router's loop."""

        async def work() -> Result:
            return function(*args)

        return self.call(work())

    def ask(self, spec: EngineSpec, name: str, payload: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Call an engine."""
        return self.call(self.process.calls.call(spec.name, name, payload or {}, self.pools.epoch))

    def check(self) -> None:
        """The ledgers add up, and every rank of every engine has the lease that they say."""
        self.here(self.pools.check)
        for spec in self.candidates:
            states = self.ask(spec, "kv_state")
            assert [state["pages"] for state in states] == self.here(self.pools.lease, spec)

    def status(self) -> dict[str, messages.EngineStatus]:
        router = self.process._router
        self.here(self.process._front.send_status)
        return {engine.name: engine for engine in self.here(router.status).engines}

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
            time.sleep(0.02)

    def send(self, rid: str, prompt: list[int], new_tokens: int) -> None:
        """A greedy request."""
        self._front.send(wire.encode_warmup(rid, prompt, new_tokens))

    def receive(self, *rids: str) -> dict[str, list[int]]:
        """The tokens of requests, when all of them have ended."""
        from sglang.srt.managers.io_struct import msgpack_decode

        tokens: dict[str, array[int]] = {rid: array("q") for rid in rids}
        open_ = set(rids)
        while open_:
            if not self._outputs.poll(LIMIT_S * 1000):
                raise TimeoutError(f"{', '.join(open_)} did not end")
            output = msgpack_decode(self._outputs.recv())
            for rid, ids, reason in zip(output.rids, output.decode_ids, output.finished_reasons, strict=True):
                tokens[rid].extend(ids)
                if reason is not None:
                    open_.discard(rid)
        return {rid: list(ids) for rid, ids in tokens.items()}

    def close(self) -> None:
        """Drain, and wait for the end of everything."""
        self._control.send(messages.encode(messages.DrainRequest(1.0)))
        self._control.send(messages.encode(messages.NoMoreRequests()))
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)
