"""The router's process: makes its parts, connects them, and runs until it is told to end. What they do is theirs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import setproctitle
import uvloop
import zmq

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.core.process import die_with_parent, ignore_stop_signals, process_context
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.calls import EngineCalls
from sglang_adapt.router.dead_gauges import forget_gauges
from sglang_adapt.router.drain import drain
from sglang_adapt.router.engine import Engine
from sglang_adapt.router.front_link import FrontLink
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.router.layout_requests import answer_layout
from sglang_adapt.router.lifecycle import Lifecycle
from sglang_adapt.router.limits import LimitKeeper
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.manager import Manager
from sglang_adapt.router.memory import KeptMemory, keeper_configs
from sglang_adapt.router.metrics import HandoverMetrics, PlanMetrics, SwitchMetrics, check_folder, metrics_folder
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.outlets import Outlets
from sglang_adapt.router.planning import ALL, make_planning
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.readback import Readback
from sglang_adapt.router.repair import Repair
from sglang_adapt.router.restarts import RestartLimit
from sglang_adapt.router.router import Router
from sglang_adapt.router.sockets import Inbox, make_socket
from sglang_adapt.router.start_report import StartReport
from sglang_adapt.router.starts import EngineStarts
from sglang_adapt.router.state_metrics import StateMetrics
from sglang_adapt.router.status import status_of
from sglang_adapt.router.supervisor import Supervisor
from sglang_adapt.router.switch import Outcome, Switch
from sglang_adapt.router.tiers import bounds_of, let_go, make_admission
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.upstream import wire
from sglang_adapt.upstream.rank import configure_logging, prepare_process


def router_main(args: RouterArgs, report: Connection) -> None:
    """Start all engines, make the report (`start_report.py`) when every one is warm, route until told to drain."""
    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.update(args.environment)
    prepare_process()
    wire.assert_wire_format()

    setproctitle.setproctitle("sglang_adapt::router")
    configure_logging(args.any_server_args, "router")
    uvloop.run(_Process(args, report).run())


class _Process:
    """One run of the router. Everything happens on one event loop."""

    def __init__(self, args: RouterArgs, report: Connection) -> None:
        self._args = args
        self._config = args.config
        self._report = StartReport(report)
        self._specs = {spec.name: spec for spec in args.config.candidates}
        self._context = zmq.Context(1)
        self._stopped: asyncio.Future[None]
        self._failed = False
        self.pools: Pools | None = None
        self.modes: Modes | None = None
        self._readback: Readback | None = None
        self.manager: Manager | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        self._state = self._state_metrics()
        self._make_router()
        self._make_processes()
        self._make_layouts()
        self._make_ways()
        ports = self._args.port_args
        front = make_socket(self._context, zmq.PULL, ports.scheduler_input_ipc_name, bind=False)
        requests = Inbox(self._loop, front, self._router.on_front_message)
        self._keepers.start()
        if not self._config.share_weights:
            self._starts.next_wave()
        tickers = [self._loop.create_task(self._front.tick())]
        if self._limits is not None:
            tickers.append(self._loop.create_task(let_go(self._router, self._limits)))
        if self.manager is not None:
            tickers.append(self._loop.create_task(self.manager.run()))
        try:
            await self._stopped
        finally:
            for ticker in tickers:
                ticker.cancel()
            requests.close()
            self._front.close()
            self._starts.close()
            self._context.destroy(linger=500)
        if self._failed:
            raise SystemExit(1)

    def _make_router(self) -> None:
        """The router, and its ways to the front."""
        ports = self._args.port_args
        tokenizer = make_socket(self._context, zmq.PUSH, ports.tokenizer_ipc_name, bind=False)
        skip_detokenizer = self._args.any_server_args.skip_tokenizer_init
        outputs = (
            tokenizer
            if skip_detokenizer
            else make_socket(self._context, zmq.PUSH, ports.detokenizer_ipc_name, bind=False)
        )
        self._front = FrontLink(
            self._loop,
            make_socket(self._context, zmq.PAIR, self._args.control_endpoint, bind=False),
            self._config.candidates,
            layout=lambda request: answer_layout(request, self._config, self._router, self._readback, self.manager),
            drain=self._drain,
            ticked=self._ticked,
        )
        admission = make_admission(self._args, self._front.send_report)
        self._traffic = None
        if self._config.policy is AdaptPolicy.AUTO:
            self._traffic = Traffic(admission.tier_of if admission is not None else lambda rid: ALL, time.monotonic)
        self._router = self._front.router = Router(
            self._config.layout,
            Outlets(
                tokenizer=tokenizer.send,
                outputs=outputs.send,
                ready=lambda engine: self._lifecycle.engine_warm(self._specs[engine.name]),
                changed=self._changed,
                lost=lambda engine: self._kill(engine, "it does not take messages any more"),
                replied=lambda engine, data: self.calls.on_reply(engine.name, data),
                stranded=lambda: self._repair.wake(),
                placing=self._placing,
                taken=self._taken,
                long_waits=self._long_waits,
                ended=self._request_ended,
            ),
            deaths_limit=max(1, self._config.restart_limit - 1),
            admission=admission,
            traffic=self._traffic,
            lengths=self._lengths(),
        )
        self.calls = EngineCalls(
            lambda name, data: self._router.engines[name].send(data), self._router.is_ready, self._noticed
        )

    def _lengths(self) -> Lengths | None:
        """How long requests may become; None with a single TP size, where stock decides."""
        pool = self._args.pool
        if pool is None:
            return None
        limits = {spec.name: pool.request_tokens[spec.tp] for spec in self._config.candidates}
        return Lengths(limits, self._config.policy, self._args.any_server_args.allow_auto_truncate)

    def _long_waits(self) -> None:
        if self.manager is not None:
            self.manager.hurry()

    def _make_processes(self) -> None:
        """What starts and watches keepers and engines."""
        context = process_context(self._config.start_method)
        limit = RestartLimit(self._config.restart_limit, self._config.restart_window_s)
        self._keepers = Keepers(
            self._loop,
            context,
            keeper_configs(self._args),
            limit,
            on_ready=lambda: self._lifecycle.keepers_ready(),
            on_lost=lambda devices, why: self._lifecycle.keeper_lost(devices, why),
            on_failed=lambda why: self._lifecycle.keeper_failed(why),
        )
        self._memory = KeptMemory(self._args, self._keepers)
        self._supervisor = Supervisor(
            self._loop,
            context,
            lambda spec: self._starts.make_ranks(spec),
            limit,
            on_loaded=lambda spec, reports: self._starts.loaded(spec, reports),
            on_lost=lambda spec, why, again: self._lifecycle.engine_lost(spec, why, again),
            on_gone=self._engine_gone,
            may_start=lambda spec: self.pools is None or self.pools.can_start(spec),
            on_started=lambda spec, pids: self._starts.has_started(spec, pids),
        )

    def _engine_gone(self, spec: EngineSpec) -> None:
        """All ranks of a lost engine have ended."""
        if self._state is not None:
            for process in self._supervisor.run_of(spec).processes:
                assert process.pid is not None
                forget_gauges(metrics_folder(), process.pid)
        self._lifecycle.engine_gone(spec)

    def _make_layouts(self) -> None:
        """KV pools and the switch, if there are several TP sizes."""
        if self._args.pool is None:
            return
        self.pools = self._front.pools = Pools(
            self._args.pool,
            self._config.candidates,
            self._config.layout.engines,
            self.calls.call,
            self._supervisor.kill,
            freed=self._retry_soon,
        )
        self.modes = Modes(
            self._router,
            self.pools,
            self._specs,
            self._memory.kv_handles,
            self._config.switch_drain_timeout_s,
            self._config.kv_copy,
            ended=self._switch_ended(),
            ablation=self._config.ablation,
        )
        self._readback = Readback(
            self._router, self.pools, self.modes, self._specs, self._config.sp_tokens, self._config.kv_copy
        )
        self.manager = manager = self._make_manager(self.modes)
        told = self.modes.handovers.told
        told.took = manager.handed_over
        if self._args.any_server_args.enable_metrics:
            handover = HandoverMetrics(self._args.any_server_args.extra_metric_labels or {})
            told.count, told.waits = handover.count, handover.waits

            def took(seconds: float) -> None:
                handover.took(seconds)
                manager.handed_over(seconds)

            told.took = took

    def _make_ways(self) -> None:
        """What follows from what happens to engines, keepers and requests."""
        self._starts = EngineStarts(
            self._args, self._loop, self._context, self._router, self._memory, self._supervisor, self.pools
        )
        self._lifecycle = Lifecycle(
            self._args,
            self._router,
            self.calls,
            self._keepers,
            self._memory,
            self._supervisor,
            self._starts,
            self.pools,
            self.modes,
            self._report,
            self._end,
        )
        self._repair = Repair(self._router, self.calls.call, self._kill, self._epoch)
        self._limits: LimitKeeper | None = None
        if self._router.admission is not None:
            self._limits = LimitKeeper(self._router.admission.limits, self.calls.begin, self._kill, self._epoch)

    def _switch_ended(self) -> Callable[[Switch, Outcome], None]:
        """What counts the switches, if metrics are wanted, and tells the manager of them."""
        args = self._args.any_server_args
        count = SwitchMetrics(args.extra_metric_labels or {}).ended if args.enable_metrics else None

        def ended(switch: Switch, outcome: Outcome) -> None:
            if count is not None:
                count(switch, outcome)
            if self.manager is not None:
                self.manager.switched(switch, outcome)

        return ended

    def _make_manager(self, modes: Modes) -> Manager:
        """Who decides on the layout."""
        args, config = self._args, self._config
        if self._traffic is None:
            return Manager(config.policy, modes, self._router)
        assert args.pool is not None and args.tiers is not None
        stock = args.any_server_args
        planned = (
            PlanMetrics(stock.extra_metric_labels or {}).planned if stock.enable_metrics else lambda plan, seconds: None
        )
        bounds = {tp: bounds_of(server_args) for tp, server_args in args.server_args.items()}
        planning = make_planning(config, args.pool, args.tiers, self._router.admission, bounds, planned)
        return Manager(config.policy, modes, self._router, config.interval_s, planning, self._traffic)

    def _state_metrics(self) -> StateMetrics | None:
        """What tells the state, if metrics are wanted."""
        args = self._args.any_server_args
        if not args.enable_metrics:
            return None
        check_folder()
        return StateMetrics(args.extra_metric_labels or {})

    def _ticked(self) -> None:
        if self.modes is not None:
            self.modes.kept.make_room()
        self._tell_state()

    def _tell_state(self) -> None:
        if self._state is not None:
            blocks = {} if self.pools is None else self.pools.states()
            self._state.tell(status_of(self._router), self._router.in_flight, blocks)

    def _retry_soon(self) -> None:
        """Start engines that wait for blocks; not at once, because a switch is in the middle of a step."""
        self._loop.call_soon(self._supervisor.retry)

    def _epoch(self) -> int:
        return 0 if self.pools is None else self.pools.epoch

    def _kill(self, engine: Engine, why: str) -> None:
        self._supervisor.kill(self._specs[engine.name], why)

    def _changed(self) -> None:
        """The state of an engine, or the layout, is another one."""
        self._repair.wake()
        if self.manager is not None:
            self.manager.reassign()
        if self.modes is not None:
            self.modes.handovers.wake()
        self._lifecycle.report_if_ready()
        self._front.send_status()

    def _placing(self, rid: str, engine: Engine) -> None:
        """What it is given next may need tighter limits: they have to be there when the engine begins to read it."""
        if self._limits is not None:
            assert self._router.admission is not None
            self._limits.tell(engine, self._router.admission.limits(engine, rid))

    def _taken(self, rid: str) -> None:
        if self.modes is not None:
            self.modes.kept.taken(rid)

    def _request_ended(self, engine: Engine) -> None:
        if self.modes is not None:
            self.modes.handovers.ended(engine)

    def _noticed(self, name: str, payload: dict[str, Any]) -> None:
        assert self.modes is not None, f"{name} hands requests over, but shares no KV pool"
        self.modes.handovers.noticed(name, payload)

    async def _drain(self, timeout_s: float) -> None:
        await drain(timeout_s, self._router, self.modes, self._starts, self._supervisor, self._keepers)
        self._lifecycle.drained()

    def _end(self, failed: bool) -> None:
        self._failed = self._failed or failed
        if not self._stopped.done():
            self._stopped.set_result(None)
