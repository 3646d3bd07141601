"""Each start of an engine: which come first, its sockets and ports, what its ranks are told, its warm-up request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from sglang_adapt.core.config import WARMUP_PROMPT, WARMUP_TOKENS
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.core.ports import hold
from sglang_adapt.engine.process import rank_main
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.memory import KeptMemory
from sglang_adapt.router.observe import make_observer, start_waves
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.sockets import Inbox, make_socket
from sglang_adapt.router.supervisor import RankStart, Supervisor
from sglang_adapt.upstream import wire
from sglang_adapt.upstream.rank import RankArgs
from sglang_adapt.upstream.shared_files import LoadSlots

logger = logging.getLogger(__name__)


class EngineStarts:
    """See the module.

    Args:
        args: of the router.
        loop: the router's event loop.
        context: of the sockets.
        router: gets what engines send.
        memory: of the keepers.
        supervisor: runs the processes.
        pools: that give engines their first lease; None with a single TP size.

    Attributes:
        infos: what rank 0 of each engine has reported at its last start.
    """

    def __init__(
        self,
        args: RouterArgs,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context,
        router: Router,
        memory: KeptMemory,
        supervisor: Supervisor,
        pools: Pools | None,
    ) -> None:
        self._args = args
        self._config = args.config
        self._loop = loop
        self._context = context
        self._router = router
        self._memory = memory
        self._supervisor = supervisor
        self._pools = pools
        self.infos: dict[EngineSpec, dict[str, Any]] = {}
        self._inputs: dict[EngineSpec, zmq.Socket] = {}
        self._outputs: dict[EngineSpec, Inbox] = {}
        self._starts: dict[EngineSpec, int] = {}
        self._meeting: dict[EngineSpec, socket.socket] = {}
        self._waves = start_waves(args.config.candidates, args.config.start_in_turn)
        self._observer = make_observer(args.config, args.server_args)
        for spec in self._config.candidates:
            router.add_engine(Engine(spec.name, send=self._sender(spec)))

    def _sender(self, spec: EngineSpec) -> Any:
        return lambda data: self._inputs[spec].send(data, zmq.NOBLOCK)

    def next_wave(self) -> None:
        """Start the next wave of engines, if one is left."""
        for spec in self._waves.pop(0) if self._waves else ():
            logger.info("engine %s: starting %d rank%s", spec, spec.tp, "s" if spec.tp > 1 else "")
            self._supervisor.start(spec)

    def has_started(self, spec: EngineSpec, pids: list[int]) -> None:
        """The ranks of an engine have been started, for the first time or again."""
        self._router.engines[spec.name].pids = pids

    @property
    def begun(self) -> bool:
        """A wave has been started."""
        return len(self.started()) > 0

    def started(self) -> list[EngineSpec]:
        """All but those whose wave has not come yet."""
        waiting = {spec for wave in self._waves for spec in wave}
        return [spec for spec in self._config.candidates if spec not in waiting]

    def make_ranks(self, spec: EngineSpec) -> list[RankStart]:
        """Fresh sockets and ports for a new start of an engine, so that nothing of an earlier one can arrive."""
        number = self._starts[spec] = self._starts.get(spec, -1) + 1
        engine = self._router.engines[spec.name]
        engine.restarts = number
        engine.state = EngineState.STARTING
        if self._observer is not None:
            self._observer.starting(spec)
        if spec in self._inputs:
            self._inputs[spec].close(linger=0)
            self._outputs[spec].close()
        base = f"ipc://{Path(self._config.run_dir) / f'{spec.name}.{number}'}"
        self._inputs[spec] = make_socket(self._context, zmq.PUSH, f"{base}.in", bind=True)
        output = make_socket(self._context, zmq.PULL, f"{base}.out", bind=True)
        self._outputs[spec] = Inbox(self._loop, output, lambda data: self._router.on_engine_message(engine, data))
        leases = None if self._pools is None else self._pools.first_lease(spec)
        ports = dataclasses.replace(
            self._args.port_args,
            scheduler_input_ipc_name=f"{base}.in",
            tokenizer_ipc_name=f"{base}.out",
            detokenizer_ipc_name=f"{base}.out",
            rpc_ipc_name=f"{base}.rpc",
            nccl_port=self._meeting_port(spec),
        )
        return [
            RankStart(
                rank_main,
                (
                    RankArgs(
                        engine=spec.name,
                        server_args=self._args.server_args[spec.tp],
                        port_args=ports,
                        gpu_id=self._args.device(gpu),
                        weights=self._memory.weights(gpu),
                        tp_rank=rank,
                        threads=self._config.threads_per_rank if self._config.virtual else None,
                        loads=LoadSlots(
                            self._config.run_dir,
                            len(self._config.candidates),
                            self._config.candidates.index(spec),
                        ),
                        environment=self._args.environment,
                        pool=None if leases is None else self._memory.rank_pool(spec, rank, leases[rank]),
                        sp_tokens=self._config.sp_tokens.get(spec.tp),
                        base_tp=self._config.base_tp,
                        page_copies=self._config.ablation.page_copies,
                        late_graphs=number > 0,
                    ),
                ),
            )
            for rank, gpu in enumerate(spec.gpus)
        ]

    def _meeting_port(self, spec: EngineSpec) -> int:
        """A TCP port on which an engine's ranks will meet, kept for them until they have."""
        if spec in self._meeting:
            self._meeting[spec].close()
        self._meeting[spec] = hold(socket.AF_INET, ("127.0.0.1", 0))
        port: int = self._meeting[spec].getsockname()[1]
        return port

    def loaded(self, spec: EngineSpec, reports: dict[int, dict[str, Any]]) -> None:
        """All ranks of a start have loaded: the warm-up request is next."""
        self._meeting[spec].close()
        self.infos[spec] = reports[0]
        run = self._supervisor.run_of(spec)
        logger.info("engine %s: loaded in %.1f s, warming up", spec, time.monotonic() - run.started_at)
        self._warm_up(spec, self._starts[spec])

    def _warm_up(self, spec: EngineSpec, start: int) -> None:
        if self._starts[spec] != start or self._router.engines[spec.name].state is not EngineState.STARTING:
            return
        rid = f"{wire.WARMUP_RID_PREFIX}_{spec.name}_{start}"
        try:
            self._inputs[spec].send(wire.encode_warmup(rid, list(WARMUP_PROMPT), WARMUP_TOKENS), zmq.NOBLOCK)
        except zmq.Again:
            # Loaded, but its socket's handshake is not through yet.
            self._loop.call_later(0.01, self._warm_up, spec, start)

    def warm(self, spec: EngineSpec) -> None:
        """An engine has answered its warm-up request; the next wave starts with the last one of its own."""
        engines = self._router.engines.values()
        ready = sum(other.state is EngineState.READY for other in engines)
        seconds = time.monotonic() - self._supervisor.run_of(spec).started_at
        logger.info("engine %s: ready after %.1f s (%d of %d)", spec, seconds, ready, len(engines))
        if self._observer is not None:
            self._observer.warm(spec, self.infos[spec]["max_total_num_tokens"])
        if ready == len(self.started()):
            self.next_wave()

    def lost(self, spec: EngineSpec) -> None:
        """An engine has died, starting or not."""
        if self._observer is not None:
            self._observer.lost(spec)

    def close(self) -> None:
        """Read no more of what engines send."""
        for inbox in self._outputs.values():
            inbox.close()
        for held in self._meeting.values():
            held.close()
