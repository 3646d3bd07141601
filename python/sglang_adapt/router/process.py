"""The router's process: sockets, the event loop, and what connects supervisor and router."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import setproctitle
import uvloop
import zmq

from sglang_adapt.core import messages
from sglang_adapt.core.config import WARMUP_PROMPT, WARMUP_TOKENS, AdaptConfig, AdaptPolicy
from sglang_adapt.core.layout import EngineSpec, LayoutError, parse_layout
from sglang_adapt.core.process import die_with_parent, process_context
from sglang_adapt.engine.process import rank_main
from sglang_adapt.keeper import KeeperConfig, KeeperError, RegionSpec
from sglang_adapt.kv.ledger_format import LedgerError, ledger_bytes
from sglang_adapt.kv.sizing import PoolSettings
from sglang_adapt.memory import RegionHandle, SharedMemoryError
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.admission import Admission
from sglang_adapt.router.calls import EngineCalls
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.router.limits import LimitKeeper
from sglang_adapt.router.manager import Manager, OrderRefusedError
from sglang_adapt.router.metrics import PlanMetrics, SwitchMetrics
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.observe import make_observer, start_waves
from sglang_adapt.router.planning import ALL, make_planning
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.repair import Repair
from sglang_adapt.router.restarts import RestartLimit
from sglang_adapt.router.router import Outlets, Router
from sglang_adapt.router.sockets import Inbox, make_socket
from sglang_adapt.router.supervisor import RankStart, Supervisor
from sglang_adapt.router.switch import Outcome, Switch, SwitchRefusedError
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.upstream import wire
from sglang_adapt.upstream.kv_pool import RankPool
from sglang_adapt.upstream.rank import RankArgs, configure_logging, prepare_process
from sglang_adapt.upstream.shared_files import LoadSlots

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
"""How often the router tells the front that it lives."""
_STOP_TIMEOUT_S = 15.0
_LET_GO_INTERVAL_S = 0.05
_MOST_REQUESTS = 4096
"""That an engine runs at a time, where stock bounds it by its memory only."""
_KV_REGION = "kv"
_LEDGER_REGION = "ledger"


@dataclass(frozen=True)
class RouterArgs:
    """What the router's process needs; picklable.

    Attributes:
        config: the deployment.
        server_args: stock ServerArgs by TP size.
        port_args: stock PortArgs of the front: where requests come from and answers go to.
        control_endpoint: where the front listens for `core.messages`.
        environment: the front's environment.
        pool: the KV pool of every GPU; None for a deployment of one TP size, whose engines have their own.
        tiers: tiers, if there are any, and how fast the engines are.
    """

    config: AdaptConfig
    server_args: dict[int, Any]
    port_args: Any
    control_endpoint: str
    environment: dict[str, str]
    pool: PoolSettings | None = None
    tiers: TierSettings | None = None


def router_main(args: RouterArgs, report: Connection) -> None:
    """Start all engines, report when every one is warm, route until told to drain.

    The report is one dict: `status` "ready" with `max_total_num_tokens`, `max_req_input_len`, `startup_time` and
    `pids`, or `status` "failed" with `error`.
    """
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.update(args.environment)
    prepare_process()
    wire.assert_wire_format()

    setproctitle.setproctitle("sglang_adapt::router")
    configure_logging(next(iter(args.server_args.values())), "router")
    uvloop.run(_Process(args, report).run())


class _Process:
    """One run of the router. Everything happens on one event loop."""

    def __init__(self, args: RouterArgs, report: Connection) -> None:
        self._args = args
        self._config = args.config
        self._report: Connection | None = report
        self._context = zmq.Context(1)
        self._stopped: asyncio.Future[None]
        self._inputs: dict[EngineSpec, zmq.Socket] = {}
        self._outputs: dict[EngineSpec, Inbox] = {}
        self._starts: dict[EngineSpec, int] = {}
        self._infos: dict[EngineSpec, dict[str, Any]] = {}
        self._draining: asyncio.Task[None] | None = None
        self.pools: Pools | None = None
        self.modes: Modes | None = None
        self.manager: Manager | None = None
        self._asked: set[asyncio.Task[None]] = set()
        self._engines_started = False
        self._waves = start_waves(args.config.candidates, args.config.start_in_turn)
        self._observer = make_observer(args.config, args.server_args)
        self._failed = False

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        ports = self._args.port_args
        tokenizer = make_socket(self._context, zmq.PUSH, ports.tokenizer_ipc_name, bind=False)
        skip_detokenizer = next(iter(self._args.server_args.values())).skip_tokenizer_init
        outputs = (
            tokenizer
            if skip_detokenizer
            else make_socket(self._context, zmq.PUSH, ports.detokenizer_ipc_name, bind=False)
        )
        control = make_socket(self._context, zmq.PAIR, self._args.control_endpoint, bind=False)
        self._control = Inbox(self._loop, control, self._on_control)
        admission = self._make_admission()
        self._traffic = None
        if self._config.policy is AdaptPolicy.AUTO:
            self._traffic = Traffic(admission.tier_of if admission is not None else lambda rid: ALL, time.monotonic)
        self._router = Router(
            self._config.layout,
            Outlets(
                tokenizer=tokenizer.send,
                outputs=outputs.send,
                ready=self._ready,
                changed=self._changed,
                lost=self._not_taking,
                replied=lambda engine, data: self.calls.on_reply(engine.name, data),
                stranded=lambda: self._repair.wake(),
                placed=self._placed,
            ),
            deaths_limit=max(1, self._config.restart_limit - 1),
            admission=admission,
            traffic=self._traffic,
        )
        self.calls = EngineCalls(lambda name, data: self._router.engines[name].send(data))
        context = process_context(self._config.start_method)
        limit = RestartLimit(self._config.restart_limit, self._config.restart_window_s)
        self._keepers = Keepers(
            self._loop,
            context,
            self._keeper_configs(),
            limit,
            on_ready=self._on_keepers_ready,
            on_lost=self._on_keeper_lost,
            on_failed=self._on_keeper_failed,
        )
        self._supervisor = Supervisor(
            self._loop,
            context,
            self._make_ranks,
            limit,
            self._on_loaded,
            self._on_lost,
            self._on_gone,
            may_start=lambda spec: self.pools is None or self.pools.can_start(spec),
        )
        pool = self._args.pool
        if pool is not None:
            active = self._config.layout.engines
            self.pools = Pools(
                pool,
                self._config.candidates,
                active,
                self.calls.call,
                self._supervisor.kill,
                freed=self._retry_soon,
            )
        self._specs = {spec.name: spec for spec in self._config.candidates}
        self._repair = Repair(
            self._router,
            self.calls.call,
            lambda engine, why: self._supervisor.kill(self._specs[engine.name], why),
            lambda: 0 if self.pools is None else self.pools.epoch,
        )
        self._limits = None
        if self._router.admission is not None:
            self._limits = LimitKeeper(
                self._router.admission.limits,
                self.calls.call,
                lambda engine, why: self._supervisor.kill(self._specs[engine.name], why),
                lambda: 0 if self.pools is None else self.pools.epoch,
            )
        if self.pools is not None:
            count = self._count_switch()
            self.modes = Modes(
                self._router,
                self.pools,
                self._specs,
                self._kv_regions,
                self._config.switch_drain_timeout_s,
                ended=lambda switch, outcome: self._switch_ended(count, switch, outcome),
            )
            self.manager = self._make_manager(self.modes)
        for spec in self._config.candidates:
            self._router.add_engine(Engine(spec.name, send=self._sender(spec)))
        self._keepers.start()
        if not self._config.share_weights:
            self._start_engines()
        front = make_socket(self._context, zmq.PULL, ports.scheduler_input_ipc_name, bind=False)
        inboxes = [Inbox(self._loop, front, self._router.on_front_message), self._control]
        tickers = [self._loop.create_task(self._tick()), self._loop.create_task(self._let_go())]
        if self.manager is not None:
            tickers.append(self._loop.create_task(self.manager.run()))
        try:
            await self._stopped
        finally:
            for ticker in tickers:
                ticker.cancel()
            for inbox in [*inboxes, *self._outputs.values()]:
                inbox.close()
            self._context.destroy(linger=500)
        if self._failed:
            raise SystemExit(1)

    def _count_switch(self) -> Callable[[Switch, Outcome], None]:
        """What counts the switches: nothing, unless metrics are wanted."""
        args = next(iter(self._args.server_args.values()))
        if not args.enable_metrics:
            return lambda switch, outcome: None
        return SwitchMetrics(args.extra_metric_labels or {}).ended

    def _switch_ended(self, count: Callable[[Switch, Outcome], None], switch: Switch, outcome: Outcome) -> None:
        count(switch, outcome)
        if self.manager is not None:
            self.manager.switched(switch, outcome)

    def _make_manager(self, modes: Modes) -> Manager:
        """Who decides on the layout."""
        args, config = self._args, self._config
        if self._traffic is None:
            return Manager(config.policy, modes, self._router)
        assert args.pool is not None and args.tiers is not None
        stock = next(iter(args.server_args.values()))
        planned = (
            PlanMetrics(stock.extra_metric_labels or {}).planned if stock.enable_metrics else lambda plan, seconds: None
        )
        bounds = {tp: _bounds(server_args) for tp, server_args in args.server_args.items()}
        planning = make_planning(config, args.pool, args.tiers, self._router.admission, bounds, planned)
        return Manager(config.policy, modes, self._router, config.interval_s, planning, self._traffic)

    def _retry_soon(self) -> None:
        """Start engines that wait for blocks; not at once, because a switch is in the middle of a step."""
        self._loop.call_soon(self._supervisor.retry)

    def _make_admission(self) -> Admission | None:
        tiers = self._args.tiers
        if tiers is None or tiers.config is None:
            return None
        return Admission(
            tiers,
            {spec.name: spec.tp for spec in self._config.candidates},
            {tp: _bounds(args) for tp, args in self._args.server_args.items()},
            self._send_report,
            lambda: time.monotonic() * 1000,
        )

    def _start_engines(self) -> None:
        """Start the next wave of engines."""
        for spec in self._waves.pop(0):
            logger.info("engine %s: starting %d rank%s", spec, spec.tp, "s" if spec.tp > 1 else "")
            self._router.engines[spec.name].pids = self._supervisor.start(spec).pids

    def _started_engines(self) -> list[EngineSpec]:
        """All but those whose wave has not come yet."""
        waiting = {spec for wave in self._waves for spec in wave}
        return [spec for spec in self._config.candidates if spec not in waiting]

    # What the keepers tell.

    def _keeper_configs(self) -> list[KeeperConfig]:
        """One keeper a GPU; virtual GPUs share one, because their memory is the host's."""
        config = self._config
        if not config.share_weights:
            return []
        finest = config.tp_sizes[-1]
        args = self._args.server_args[finest]
        groups = [tuple(range(config.gpus))] if config.virtual else [(gpu,) for gpu in range(config.gpus)]
        return [
            KeeperConfig(
                args,
                finest,
                tuple(self._device(args, gpu) for gpu in group),
                self._regions(),
                environment=self._args.environment,
            )
            for group in groups
        ]

    def _regions(self) -> tuple[RegionSpec, ...]:
        """What every keeper owns beside the weights."""
        if self._args.pool is None:
            return ()
        geometry = self._args.pool.geometry
        return (
            RegionSpec(_KV_REGION, geometry.region_bytes, sized_by="--max-total-tokens"),
            RegionSpec(_LEDGER_REGION, ledger_bytes(geometry), on_host=True),
        )

    def _kv_regions(self) -> dict[int, RegionHandle]:
        """The KV region of each of the deployment's GPUs. Raises KeeperError if a keeper is not ready."""
        args = self._args.server_args[self._config.tp_sizes[-1]]
        return {gpu: self._keepers.region(_KV_REGION, self._device(args, gpu)) for gpu in range(self._config.gpus)}

    @staticmethod
    def _device(server_args: Any, gpu: int) -> int:
        """The device index of one of the deployment's GPUs."""
        index: int = server_args.base_gpu_id + gpu * server_args.gpu_id_step
        return index

    def _on_keepers_ready(self) -> None:
        if self.pools is not None:
            args = self._args.server_args[self._config.tp_sizes[-1]]
            gpus = range(self._config.gpus)
            try:
                self.pools.open({gpu: self._keepers.region(_LEDGER_REGION, self._device(args, gpu)) for gpu in gpus})
            except (KeeperError, SharedMemoryError, LedgerError) as error:
                self._on_keeper_failed(f"the ledgers of the KV pools cannot be used: {error}")
                return
        if self._engines_started:
            self._supervisor.resume()
        else:
            self._engines_started = True
            self._start_engines()

    def _on_keeper_lost(self, devices: tuple[int, ...], why: str) -> None:
        """Its memory is gone, so its GPUs' engines go too, and come back when it has loaded anew."""
        logger.error("%s; its engines are started anew when it has loaded", why)
        self._supervisor.hold()
        args = self._args.server_args[self._config.tp_sizes[-1]]
        for spec in self._started_engines():
            if any(self._device(args, gpu) in devices for gpu in spec.gpus):
                self._supervisor.kill(spec, why)

    def _on_keeper_failed(self, why: str) -> None:
        if self._report is not None:
            self._finish_report({"status": "failed", "error": why})
        logger.critical("%s; without its memory nothing can be served", why)
        self._supervisor.abandon()
        self._failed = True
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _sender(self, spec: EngineSpec) -> Any:
        return lambda data: self._inputs[spec].send(data, zmq.NOBLOCK)

    def _make_ranks(self, spec: EngineSpec) -> list[RankStart]:
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
        server_args = self._args.server_args[spec.tp]
        leases = None if self.pools is None else self.pools.first_lease(spec)
        ports = dataclasses.replace(
            self._args.port_args,
            scheduler_input_ipc_name=f"{base}.in",
            tokenizer_ipc_name=f"{base}.out",
            detokenizer_ipc_name=f"{base}.out",
            rpc_ipc_name=f"{base}.rpc",
            nccl_port=_free_port(),
        )
        return [
            RankStart(
                rank_main,
                (
                    RankArgs(
                        engine=spec.name,
                        server_args=server_args,
                        port_args=ports,
                        gpu_id=self._device(server_args, gpu),
                        weights=self._keepers.weights(self._device(server_args, gpu)),
                        tp_rank=rank,
                        threads=self._config.threads_per_rank if self._config.virtual else None,
                        loads=LoadSlots(self._config.run_dir, len(self._specs), list(self._specs).index(spec.name)),
                        environment=self._args.environment,
                        pool=None if leases is None else self._rank_pool(spec, rank, leases[rank]),
                    ),
                ),
            )
            for rank, gpu in enumerate(spec.gpus)
        ]

    def _rank_pool(self, spec: EngineSpec, rank: int, pages: list[int]) -> RankPool:
        pool = self._args.pool
        assert pool is not None
        device = self._device(self._args.server_args[spec.tp], spec.gpus[rank])
        region = self._keepers.region(_KV_REGION, device)
        return RankPool(pool.geometry, region, tuple(pages), pool.request_tokens, tuple(spec.gpus))

    # What the supervisor tells.

    def _on_loaded(self, spec: EngineSpec, reports: dict[int, dict[str, Any]]) -> None:
        self._infos[spec] = reports[0]
        run = self._supervisor.run_of(spec)
        self._router.engines[spec.name].pids = run.pids
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

    def _on_lost(self, spec: EngineSpec, why: str, again: bool) -> None:
        engine = self._router.engines[spec.name]
        if self._observer is not None:
            self._observer.lost(spec)
        text = f"engine {spec.name} is down: {why}"
        self.calls.engine_lost(spec.name, why)
        if not self._keepers.ready:
            # A keeper that has just ended takes its engines with it, and may be noticed after them.
            self._supervisor.hold()
        if self._report is not None:
            self._supervisor.abandon()
            self._finish_report({"status": "failed", "error": text})
            self._stopped.set_result(None)
            return
        if self._stopped.done():
            return
        if again:
            logger.error("%s; starting it again", text)
        else:
            logger.critical("%s; it died too often, so it is given up", text)
        engine.pids = []
        self._router.engine_lost(engine, EngineState.DEAD if again else EngineState.FAILED, text)
        if self.modes is not None:
            self.modes.engine_lost(spec, text)

    def _on_gone(self, spec: EngineSpec) -> None:
        if self.pools is not None:
            self.pools.engine_gone(spec)
        if self.modes is not None:
            self.modes.engine_gone()

    # What the router tells.

    def _ready(self, engine: Engine) -> None:
        engines = self._router.engines.values()
        ready = sum(other.state is EngineState.READY for other in engines)
        seconds = time.monotonic() - self._supervisor.run_of(self._specs[engine.name]).started_at
        logger.info("engine %s: ready after %.1f s (%d of %d)", engine.name, seconds, ready, len(engines))
        if self._observer is not None:
            spec = self._specs[engine.name]
            self._observer.warm(spec, self._infos[spec]["max_total_num_tokens"])
        if self._waves and ready == len(engines) - sum(map(len, self._waves)):
            self._start_engines()
        if self.modes is not None:
            self.modes.engine_ready(self._specs[engine.name])

    def _changed(self) -> None:
        self._repair.wake()
        engines = self._router.engines.values()
        if self._report is not None and all(engine.state is EngineState.READY for engine in engines):
            self._finish_report(
                {
                    "status": "ready",
                    "max_total_num_tokens": self._infos[self._config.layout.engines[0]]["max_total_num_tokens"],
                    "max_req_input_len": min(info["max_req_input_len"] for info in self._infos.values()),
                    "startup_time": self._infos[self._config.layout.engines[0]]["startup_time"],
                    "pids": [pid for engine in engines for pid in engine.pids],
                }
            )
        self._send_status()

    def _finish_report(self, report: dict[str, Any]) -> None:
        assert self._report is not None
        self._report.send(report)
        self._report.close()
        self._report = None

    def _placed(self, engine: Engine) -> None:
        """What it has been given may need tighter limits, before the next prompt comes."""
        if self._limits is not None:
            self._limits.refresh([engine])

    def _not_taking(self, engine: Engine) -> None:
        self._supervisor.kill(self._specs[engine.name], "it does not take messages any more")

    # What the front tells, and what it is told.

    def _on_control(self, data: bytes) -> None:
        request = messages.decode_front_to_router(data)
        if isinstance(request, messages.StatusRequest):
            self._send_status()
        elif isinstance(request, (messages.SwitchRequest, messages.LayoutRequest, messages.PlanRequest)):
            task = self._loop.create_task(self._answer_layout(request))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        elif isinstance(request, messages.AdmitRequest):
            self._control.send(messages.encode(self._admit(request)))
        elif isinstance(request, messages.PlaceReturned):
            if self._router.admission is not None:
                self._router.admission.give_back(request.id)
        elif isinstance(request, messages.TiersOrder):
            if self._router.admission is not None:
                self._router.admission.reload(request.config)
        elif self._draining is None:
            self._draining = self._loop.create_task(self._drain(request.timeout_s))

    def _admit(self, request: messages.AdmitRequest) -> messages.AdmitAnswer:
        """Whether a request will be served."""
        if self._router.admission is None:
            return messages.AdmitAnswer(request.id, True)
        if not self._router.accepting:
            return messages.AdmitAnswer(request.id, False, reason="the server is shutting down", draining=True)
        return self._router.admission.ask(request, self._router.serving())

    async def _answer_layout(
        self, request: messages.SwitchRequest | messages.LayoutRequest | messages.PlanRequest
    ) -> None:
        status, body = await self._layout(request)
        self._control.send(messages.encode(messages.LayoutAnswer(request.id, status, body)))

    async def _layout(
        self, request: messages.SwitchRequest | messages.LayoutRequest | messages.PlanRequest
    ) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of what is asked about the layout."""
        if self.modes is None or self.manager is None:
            return 409, {
                "code": "one_tp_size",
                "message": "this server has engines of one TP size, whose layout is fixed; start it with several "
                "--adapt-tp-sizes",
            }
        if isinstance(request, messages.LayoutRequest):
            return 200, await self.modes.readback() | self.manager.said()
        if isinstance(request, messages.PlanRequest):
            return await self._what_if(self.manager, request.rates)
        if request.layout == "auto":
            try:
                self.manager.release()
            except OrderRefusedError as error:
                return 409, {"code": "no_planner", "message": str(error)}
            return 200, {"active": str(self._router.layout), "control": "planner"}
        try:
            layout = parse_layout(request.layout, self._config.tp_sizes, self._config.gpus)
            strategy = Strategy(request.strategy)
        except (LayoutError, ValueError) as error:
            return 400, {"code": "bad_layout", "message": str(error)}
        if not self._router.accepting:
            return 503, {"code": "draining", "message": "the server is shutting down"}
        try:
            switch = await self.manager.order(layout, strategy, request.reason)
        except OrderRefusedError as error:
            return 409, {"code": "static_layout", "message": str(error)}
        except SwitchRefusedError as error:
            return 409, {"code": "switch_refused", "message": str(error)}
        except Exception as error:  # noqa: BLE001 -- logged where it happened, and told
            return 500, {"code": "switch_failed", "message": f"{type(error).__name__}: {error}"}
        return 200, {"active": str(self._router.layout), **switch.report()}

    async def _what_if(self, manager: Manager, rates: dict[str, float]) -> tuple[int, dict[str, Any]]:
        if self._router.admission is None and "" in rates:
            rates = {ALL: rates[""]}
        try:
            return 200, await manager.what_if(rates)
        except OrderRefusedError as error:
            return 409, {"code": "no_planner", "message": str(error)}
        except KeyError as error:
            return 400, {"code": "unknown_tier", "message": str(error.args[0])}

    def _send_report(self, report: messages.RequestReport) -> None:
        try:
            self._control.send(messages.encode(report))
        except zmq.Again:
            logger.warning("the front takes no messages; the report of request %s is lost", report.rid)

    def _send_status(self) -> None:
        if self.pools is not None:
            for spec in self._config.candidates:
                self._router.engines[spec.name].blocks = self.pools.counts(spec)
        try:
            self._control.send(messages.encode(self._router.status()))
        except zmq.Again:
            logger.debug("the front does not listen yet")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self._send_status()

    async def _let_go(self) -> None:
        """What waits for room gets it as time passes, too: prompts are forgotten, and work grows old."""
        while self._limits is not None:
            await asyncio.sleep(_LET_GO_INTERVAL_S)
            self._router.let_go()
            self._limits.refresh(self._router.serving())

    async def _drain(self, timeout_s: float) -> None:
        """Refuse new work, let what runs finish, stop the engines, end the process."""
        self._router.accepting = False
        logger.info("draining: %d unfinished requests, at most %.0f s", self._router.in_flight, timeout_s)
        deadline = time.monotonic() + timeout_s
        while self._router.in_flight and time.monotonic() < deadline:
            if self.modes is not None:
                self.modes.let_go("the server is shutting down, and its engine is not in the layout")
            await asyncio.sleep(0.02)
        if self._router.in_flight:
            self._router.fail_all(f"the server shut down before this request was done ({timeout_s:.0f} s)")
        stopping = self._loop.create_task(self._supervisor.stop(_STOP_TIMEOUT_S))
        await asyncio.sleep(0)
        for spec in self._started_engines():
            engine = self._router.engines[spec.name]
            if engine.state is EngineState.READY:
                engine.state = EngineState.STOPPED
                engine.send(wire.encode_shutdown())
            else:
                for process in self._supervisor.run_of(spec).processes:
                    process.kill()
        await stopping
        self._keepers.stop()
        logger.info("all engines have stopped")
        self._stopped.set_result(None)


def _bounds(args: Any) -> Bounds:
    """What engines with these stock ServerArgs can do in an iteration."""
    chunk = args.chunked_prefill_size
    return Bounds(
        page_tokens=args.page_size or 1,
        prefill_tokens=chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens,
        requests=args.max_running_requests or _MOST_REQUESTS,
    )


def _free_port() -> int:
    """A TCP port that is free now, on which an engine's ranks will meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
