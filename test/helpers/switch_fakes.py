"""A node without processes: the real router, ledgers, repair and switch, and engines that answer calls as told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
from fake_engine import SETTINGS, SPECS, FakeEngine
from node_checks import check
from router_fakes import World
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_decode

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation
from sglang_adapt.core.block_ids import unpack_ids
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.handoff import (
    HandoffCall,
    answer_payload,
    call_of,
    to_plain,
)
from sglang_adapt.core.handover import (
    Arrived,
    HandoverCall,
    NotArrived,
    PartsStay,
    TakeOverCall,
)
from sglang_adapt.core.layout import EngineSpec, parse_layout
from sglang_adapt.keeper import KeeperError
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.memory import RegionHandle, allocate
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.suspects import PAST_TOKENS
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.readback import Readback
from sglang_adapt.router.repair import Repair
from sglang_adapt.router.switch import Switch

ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
SPLIT, OTHER_SPLIT = "tp1@0:prefill,tp1@1:decode", "tp1@0:decode,tp1@1:prefill"
FAULTS = ("refuse", "die", "die after", "break", "raise")
LIMIT_S = 5.0


class Node:
    """Two GPUs, three engines, all of them up; layout ONES.

    Attributes:
        faults: by engine and kind of call, e.g. ("tp1@0", "ExportCall"): one of FAULTS, for the next such call; for
            "land", of the KV of requests that were handed over, "lost".
        during: likewise, what happens right before the engine does what it is asked.
        turns: likewise, how often the event loop turns before the answer is read; 1 unless told.
        keeper_fault: why nobody knows the KV regions of all GPUs now; empty: they are known.
        outcomes: of each switch, where it went and what came of it.
    """

    def __init__(
        self,
        drain_timeout_s: float = 0.2,
        lengths: Lengths | None = None,
        ablation: Ablation = NOTHING_OFF,
        kv_copy: CopyPath = CopyPath.PEER,
    ) -> None:
        self.world = World(ONES, lengths=lengths)
        self.router = self.world.router
        self.faults: dict[tuple[str, str], str] = {}
        self.during: dict[tuple[str, str], Callable[[], None]] = {}
        self.turns: dict[tuple[str, str], int] = {}
        self.calls: list[tuple[str, str]] = []
        self.sent: set[str] = set()
        self._landing: list[asyncio.Future[None]] = []
        self._pending: dict[str, list[asyncio.Future[None]]] = {name: [] for name in SPECS}
        self._seen = dict.fromkeys(SPECS, 0)
        self.fakes = {name: FakeEngine(spec) for name, spec in SPECS.items()}
        layout = parse_layout(ONES, (1, 2), 2)
        self.pools = Pools(SETTINGS, list(SPECS.values()), layout.engines, self._call, self._kill)
        self._regions = {gpu: allocate(ledger_bytes(SETTINGS.geometry), "cpu") for gpu in (0, 1)}
        self.pools.open({gpu: region.handle for gpu, region in self._regions.items()})
        self.keeper_fault = ""
        self.outcomes: list[str] = []
        self.modes = Modes(
            self.router,
            self.pools,
            SPECS,
            self._handles,
            drain_timeout_s,
            kv_copy,
            ended=lambda switch, outcome: self.outcomes.append(f"{switch.after}: {outcome}"),
            ablation=ablation,
        )
        self.readback = Readback(self.router, self.pools, self.modes, SPECS)
        self.repair = Repair(
            self.router, self._call, lambda engine, why: self._kill(SPECS[engine.name], why), lambda: self.pools.epoch
        )
        self.world.wake = self._wake
        self.world.ended = self.modes.handovers.ended
        self.world.taken = self.modes.kept.taken
        self._aborted_coming: set[tuple[str, str]] = set()
        for name, spec in SPECS.items():
            self.fakes[name].begin(self.pools.first_lease(spec))
        self.world.warm()

    def _wake(self) -> None:
        self.repair.wake()
        self.modes.handovers.wake()

    # Requests.

    def prefill(self, *names: str) -> None:
        """Engines read their prompts and say what comes of it."""
        self.read()
        for name in names or tuple(self.fakes):
            if self.router.engines[name].state is not EngineState.READY:
                continue
            read, told = self.fakes[name].prefill()
            for rid in read:
                self.world.tokens(name, rid, [7], len(self.router.journal[rid].ids) + 1)
            if told is not None:
                self.modes.handovers.noticed(name, to_plain(told))

    def part(self, name: str, rid: str, tokens: int) -> None:
        """An engine has read a prompt up to a token."""
        self.read()
        told = self.fakes[name].read_part(rid, tokens)
        if told is not None and self.router.engines[name].state is EngineState.READY:
            self.modes.handovers.noticed(name, to_plain(told))

    def said(self) -> dict[str, Any]:
        """What is told of hand-overs, less how long they took."""
        said = self.modes.handovers.said()
        said.pop("steps_ms", None)
        return said

    def stay(self, name: str, rid: str) -> None:
        """An engine that has told of parts decodes the request itself."""
        self.fakes[name].unread.discard(rid)
        self.modes.handovers.noticed(name, to_plain(PartsStay([rid])))

    async def _land(self, name: str, lives: int, rids: list[str]) -> None:
        """A copy has ended: the requests run."""
        for _ in range(self.turns.get((name, "land"), 1)):
            await asyncio.sleep(0)
        fake = self.fakes[name]
        if fake.lives != lives or self.router.engines[name].state is not EngineState.READY:
            return
        if self.faults.pop((name, "land"), None) is not None:
            aborted = [rid for rid in rids if (name, rid) in self._aborted_coming]
            self._aborted_coming -= {(name, rid) for rid in aborted}
            for rid in rids:
                del fake.coming[rid]
            self.modes.handovers.noticed(name, to_plain(NotArrived(rids, aborted, "its keeper is gone")))
            return
        for rid in rids:
            fake.running[rid] = fake.coming.pop(rid)
        self.modes.handovers.noticed(name, to_plain(Arrived(rids, monotonic(), {"let in": 1.0})))
        for rid in rids:
            if (name, rid) in self._aborted_coming:
                self._aborted_coming.discard((name, rid))
                del fake.running[rid]
                self.world.reply(name, io_struct.AbortReq(rid=rid))

    def request(self, *rids: str, tokens: int = 40, new: int | None = 4) -> None:
        for rid in rids:
            self.sent.add(rid)
            self.world.request(rid, tokens, new)
        self.read()

    def read(self) -> None:
        """Engines read what they were sent."""
        for name, fake in self.fakes.items():
            while self._seen[name] < len(self.world.received[name]):
                message = msgpack_decode(self.world.received[name][self._seen[name]])
                self._seen[name] += 1
                if isinstance(message, io_struct.AbortReq):
                    self._abort(name, fake, message)
                elif isinstance(message, io_struct.TokenizedGenerateReqInput):
                    fake.take(message.rid, len(message.input_ids))

    def _abort(self, name: str, fake: FakeEngine, message: io_struct.AbortReq) -> None:
        def meant(rid: str) -> bool:
            return message.abort_all or rid.startswith(message.rid)

        if fake.held is not None:
            fake.given_up |= {rid for rid in fake.held[1] if meant(rid)}
        for hold, (rid, _, _) in fake.leaving.items():
            if meant(rid) and hold not in fake.gone:
                fake.gone.add(hold)
                self.world.reply(name, io_struct.AbortReq(rid=rid))
        self._aborted_coming |= {(name, rid) for rid in fake.coming if meant(rid)}
        for rid in [rid for rid in fake.running if meant(rid)]:
            del fake.running[rid]
            self.world.reply(name, io_struct.AbortReq(rid=rid))

    def finish(self, *rids: str) -> None:
        for name, fake in self.fakes.items():
            for rid in [rid for rid in fake.running if rid in rids or not rids]:
                del fake.running[rid]
                self.world.finish(name, rid)

    def ended(self) -> Counter[str]:
        """How often each request has ended; as the front, this ignores the echo of an abort that ends nothing."""
        ended: Counter[str] = Counter()
        for output in self.world.outputs:
            ends = zip(output.rids, output.finished_reasons, strict=True)  # type: ignore[attr-defined]
            ended.update(rid for rid, reason in ends if reason)
        for message in self.world.tokenizer:
            assert isinstance(message, io_struct.AbortReq)
            if message.finished_reason or not ended[message.rid]:
                ended[message.rid] += 1
        return Counter({rid: count for rid, count in ended.items() if count})

    # Engines.

    def die(self, name: str, why: str = "killed") -> None:
        """All ranks end; that they are gone is noticed a few turns of the loop later."""
        if self.router.engines[name].state is not EngineState.READY:
            return
        self.world.connected[name] = False
        for future in self._pending[name]:
            if not future.done():
                future.set_exception(EngineGoneError(f"{name}: {why}"))
        self.router.engine_lost(self.router.engines[name], EngineState.DEAD, f"engine {name} is down: {why}")
        self.modes.engine_lost(SPECS[name], why)
        asyncio.get_running_loop().call_later(0.002, self._gone, name)

    def _gone(self, name: str) -> None:
        self.fakes[name].begin([[] for _ in SPECS[name].gpus])
        self.pools.engine_gone(SPECS[name])
        self.modes.engine_gone()

    def restart(self, name: str) -> None:
        """Its ranks are gone; start it, and let it answer its warm-up."""
        self._seen[name] = len(self.world.received[name])
        self.fakes[name].begin(self.pools.first_lease(SPECS[name]))
        self.router.engines[name].state = EngineState.STARTING
        self.world.connected[name] = True
        self.world.warm(name)
        self.modes.engine_ready(SPECS[name])

    def _kill(self, spec: EngineSpec, why: str) -> None:
        self.die(spec.name, why)

    async def _call(self, engine: str, name: str, payload: dict[str, Any], epoch: int) -> list[dict[str, Any]]:
        call: HandoffCall | HandoverCall | None = None
        if name == "handoff":
            call = call_of(payload)
        elif name == "handover":
            call = msgspec.convert(payload, HandoverCall)
        key = (engine, name if call is None else type(call).__name__)
        self.calls.append(key)
        if not self.router.is_ready(engine):
            raise EngineGoneError(f"{engine}: {key[1]} was not sent")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[engine].append(future)
        try:
            await asyncio.sleep(0)
            self.read()
            self.during.pop(key, lambda: None)()
            fault = self.faults.pop(key, None)
            if not future.done():
                match fault:
                    case "refuse":
                        raise CallRefusedError(f"{engine}: {key[1]} was refused")
                    case "die":
                        self.die(engine)
                    case "break":
                        raise CallBrokenError(f"{engine}: only some ranks did {key[1]}")
                    case "raise":
                        raise ZeroDivisionError(f"{engine}: a fault in {key[1]}")
            if future.done():
                await future
            answers = self._do(engine, name, payload, call)
            if fault == "die after":
                self.die(engine)
            for _ in range(self.turns.get(key, 1)):
                await asyncio.sleep(0)
            if future.done():
                await future
            if isinstance(call, TakeOverCall):
                rids = [request.rid for request in call.requests]
                self._landing.append(asyncio.ensure_future(self._land(engine, self.fakes[engine].lives, rids)))
            return answers
        finally:
            self._pending[engine].remove(future)
            if future.done():
                future.exception()

    def _do(
        self, engine: str, name: str, payload: dict[str, Any], call: HandoffCall | HandoverCall | None
    ) -> list[dict[str, Any]]:
        fake = self.fakes[engine]
        if name == "handover":
            return [to_plain(fake.hand_over(call))] * fake.spec.tp
        if call is not None:
            return [answer_payload(answer) for answer in fake.answer(call)]
        match name:
            case "kv_grow":
                for rank, pages in enumerate(payload["pages"]):
                    fake._join(rank, unpack_ids(pages).tolist())
            case "kv_state":
                return [{"pages": sorted(pages), "free": 0, "cached_tokens": 0} for pages in fake.lease]
            case "reload_weights":
                return [{"bytes": 1, "steps_ms": {"reload": 2.0}} for _ in SPECS[engine].gpus]
            case "recover":
                for one in payload["requests"]:
                    message = msgpack_decode(one["message"])
                    fake.take(message.rid, len(message.input_ids))
        return [{} for _ in SPECS[engine].gpus]

    def _handles(self) -> dict[int, RegionHandle]:
        if self.keeper_fault:
            raise KeeperError(self.keeper_fault)
        return {gpu: region.handle for gpu, region in self._regions.items()}

    # The test's side.

    async def switch(self, layout: str, strategy: str = "migrate") -> Switch:
        """Raises what Modes.switch does; TimeoutError if it hangs."""
        wanted = parse_layout(layout, (1, 2), 2)
        async with asyncio.timeout(LIMIT_S):
            return await self.modes.switch(wanted, Strategy(strategy), "test")

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until something holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Start again what is dead, and let everything that waits happen."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                await asyncio.sleep(0.01)
                dead = [name for name, engine in self.router.engines.items() if engine.state is EngineState.DEAD]
                for name in dead:
                    self.restart(name)
                for _ in range(20):
                    await asyncio.sleep(0)
                    self.read()
                if not dead:
                    break
            while self.router.stranded.in_flight or self.modes.handovers._tasks or self.modes.kept._tasks:
                await asyncio.sleep(0.001)
                self.suspects_go_on()
                self.read()
            await asyncio.sleep(0.005)
            self.read()

    def suspects_go_on(self) -> None:
        """Let requests that are tried alone pass the point at which their engine died."""
        for rid, entry in list(self.router.journal.items()):
            engine = self.router.places.where[rid]
            if entry.record.is_tried(2) and engine.name in self.router.engines:
                total = entry.died_at + PAST_TOKENS
                self.world.tokens(engine.name, rid, [7] * (total - len(entry.ids)), total)

    def check(self) -> None:
        """Between switches: see `node_checks`."""
        check(self)

    def where(self) -> dict[str, list[str]]:
        return {name: sorted(fake.running) for name, fake in self.fakes.items() if fake.running}
