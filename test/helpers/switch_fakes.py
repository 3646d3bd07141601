"""A node without processes: the real router, ledgers, repair and switch, and engines that answer calls as told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from router_fakes import World
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_decode

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.handoff import (
    AdoptAnswer,
    AdoptCall,
    CarriedRequest,
    ExportAnswer,
    ExportCall,
    HandoffCall,
    PrecopyAnswer,
    PrecopyCall,
    ReleaseAnswer,
    ReleaseCall,
    RequestKind,
    RestoreAnswer,
    RestoreCall,
    SnapshotAnswer,
    SnapshotCall,
    UnexportableAnswer,
    UnexportableCall,
    answer_payload,
    call_of,
    to_plain,
)
from sglang_adapt.core.handover import (
    AheadCall,
    Arrived,
    ForgetCall,
    HandoverAnswer,
    HandoverCall,
    KeepCall,
    LeaveCall,
    LetGoCall,
    PartRead,
    PartsStay,
    Prefilled,
    TakeOverCall,
)
from sglang_adapt.core.layout import EngineSpec, candidate_engines, parse_layout
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.kv.sizing import KvShape, size_pool
from sglang_adapt.memory import allocate
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.long_requests import Lengths
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.readback import Readback
from sglang_adapt.router.repair import Repair
from sglang_adapt.router.switch import Switch

SETTINGS = size_pool(KvShape(2, 4, 32, 2), (1, 2), 16, 1600, (4, 2))
SPECS = {spec.name: spec for spec in candidate_engines((1, 2), 2)}
ONES, TWO = "tp1@0,tp1@1", "tp2@0-1"
SPLIT, OTHER_SPLIT = "tp1@0:prefill,tp1@1:decode", "tp1@0:decode,tp1@1:prefill"
FAULTS = ("refuse", "die", "die after", "break", "raise")
LIMIT_S = 5.0


@dataclass
class Early:
    """What came ahead of a request: tokens, the blocks for all of it, and those that it was copied from."""

    rid: str
    tokens: int
    blocks: list[list[int]]
    source: list[list[int]]


class FakeEngine:
    """What the ranks of one engine know: requests with their blocks, the lease, and what is held."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.page = SETTINGS.geometry.tokens_per_block(spec.tp)
        self.lease: list[set[int]] = []
        self.running: dict[str, tuple[int, list[list[int]]]] = {}
        self.held: tuple[int, dict[str, tuple[int, list[list[int]]]]] | None = None
        self.given_up: set[str] = set()
        self.staying: dict[str, str] = {}
        self.most: dict[str, int] = {}
        self.told: tuple[int, dict[str, tuple[int, list[list[int]]]]] = (0, {})
        self.ahead: tuple[int, dict[str, tuple[int, list[list[int]]]]] = (0, {})
        self.unread: set[str] = set()
        self.hands_over = False
        self.leaving: dict[int, tuple[str, int, list[list[int]]]] = {}
        self.gone: set[int] = set()
        self.coming: dict[str, tuple[int, list[list[int]]]] = {}
        self.unit = 0
        self.parts: dict[str, int] = {}
        self.early: dict[int, Early] = {}
        self.lives = 0
        self.holds = 0

    def begin(self, lease: list[list[int]]) -> None:
        self.unread, self.hands_over, self.leaving, self.gone, self.coming = set(), False, {}, set(), {}
        self.unit, self.parts, self.early = 0, {}, {}
        self.lives += 1
        self.lease = [set(pages) for pages in lease]
        self.running, self.held, self.given_up = {}, None, set()
        self.told, self.ahead = (0, {}), (0, {})

    def take(self, rid: str, tokens: int) -> None:
        """Run a request; its KV goes into free blocks of the lease, or, if they do not suffice, it waits without."""
        count = -(-tokens // self.page)
        self.most[rid] = tokens + 4
        free = [sorted(self._free(rank)) for rank in range(self.spec.tp)]
        if min(map(len, free)) < count:
            tokens, count = 0, 0
        self.running[rid] = (tokens, [pages[:count] for pages in free])
        self.unread.add(rid)
        self.parts.pop(rid, None)

    def _free(self, rank: int) -> set[int]:
        held = [blocks for _, _, blocks in self.leaving.values()]
        held += [early.blocks for early in self.early.values()]
        there = [blocks for _, blocks in (*self.running.values(), *self.coming.values())]
        return self.lease[rank] - {page for blocks in (*held, *there) for page in blocks[rank]}

    def prefill(self) -> tuple[list[str], Prefilled | None]:
        """Read all prompts for which there is room: who has a first token now, and what is told of them."""
        read = [rid for rid in self.unread if rid in self.running and self.running[rid][0]]
        self.unread = {rid for rid in self.unread if rid in self.running} - set(read)
        if not read or not self.hands_over:
            return read, None
        told = Prefilled([], [], [])
        for rid in read:
            tokens, blocks = self.running.pop(rid)
            self.holds += 1
            self.leaving[self.holds] = (rid, tokens, blocks)
            told.requests.append(
                CarriedRequest(rid, RequestKind.RUNNING, tokens, tokens + 1, self.most[rid], None, b"-")
            )
            told.holds.append(self.holds)
            told.blocks.append(blocks)
        return read, told

    def read_part(self, rid: str, tokens: int) -> PartRead | None:
        """Read a prompt up to a token, less than all of it: what is told. Up to its first token: that it is read."""
        if not self.hands_over or rid not in self.unread or not self.running.get(rid, (0,))[0]:
            return None
        kv, blocks = self.running[rid]
        first, end = self.parts.get(rid, 0), min(tokens, kv - 1) // self.unit * self.unit
        if end <= first and (rid in self.parts or end):
            return None
        self.parts[rid] = end
        mine = [rank[first // self.page : end // self.page] for rank in blocks]
        return PartRead(rid, first, end, kv + 1, self.most[rid], mine)

    def _bring(self, call: AheadCall) -> None:
        early = self.early.get(call.number)
        per_block = SETTINGS.geometry.tokens_per_block(len(call.source.gpus))
        assert [len(mine) for mine in call.source.blocks] == [(call.end - call.first) // per_block] * len(
            call.source.gpus
        )
        if early is None:
            count, free = -(-(call.tokens - 1) // self.page), [sorted(self._free(rank)) for rank in range(self.spec.tp)]
            if call.first or min(map(len, free)) < count:
                raise CallRefusedError(f"{self.spec}: no room, or it was given up")
            early = Early(call.rid, 0, [pages[:count] for pages in free], [[] for _ in call.source.gpus])
        assert (early.rid, early.tokens) == (call.rid, call.first)
        source = [[*mine, *pages] for mine, pages in zip(early.source, call.source.blocks, strict=True)]
        self.early[call.number] = Early(call.rid, call.end, early.blocks, source)

    def hand_over(self, call: HandoverCall) -> HandoverAnswer:
        match call:
            case LeaveCall():
                self.hands_over, self.unit = call.on, call.unit
                self.parts.clear()
            case AheadCall():
                self._bring(call)
            case ForgetCall():
                for number in call.numbers:
                    self.early.pop(number, None)
            case TakeOverCall():
                came = 0
                here = {*self.running, *self.coming}
                assert not here & {request.rid for request in call.requests}
                made: dict[str, tuple[int, list[list[int]]]] = {}
                free = [sorted(self._free(rank)) for rank in range(self.spec.tp)]
                for request, source, number in zip(call.requests, call.sources, call.ahead, strict=True):
                    early = self.early.get(number)
                    first: list[list[int]] = [[] for _ in free]
                    if early is not None:
                        assert early.rid == request.rid
                        for mine, whole in zip(early.source, source.blocks, strict=True):
                            assert mine == whole[: len(mine)]
                        first, came = early.blocks, came + early.tokens
                    count = -(-request.kv_tokens // self.page) - len(first[0])
                    if min(map(len, free)) < count:
                        raise CallRefusedError(f"{self.spec}: no room")
                    assert request.most_tokens <= SETTINGS.request_tokens[self.spec.tp]
                    self.most[request.rid] = request.most_tokens
                    blocks = [[*mine, *pages[:count]] for mine, pages in zip(first, free, strict=True)]
                    made[request.rid] = (request.kv_tokens, blocks)
                    free = [pages[count:] for pages in free]
                self.coming |= made
                for number in call.ahead:
                    self.early.pop(number, None)
                return HandoverAnswer(ahead_tokens=came)
            case LetGoCall():
                for hold in call.holds:
                    del self.leaving[hold]
                    self.gone.discard(hold)
            case KeepCall():
                kept = [hold for hold in call.holds if hold not in self.gone]
                for hold in kept:
                    rid, tokens, blocks = self.leaving.pop(hold)
                    assert rid not in self.running
                    self.running[rid] = (tokens, blocks)
                return HandoverAnswer(kept)
        return HandoverAnswer()

    def answer(self, call: HandoffCall) -> list[Any]:
        ranks = range(self.spec.tp)
        match call:
            case UnexportableCall():
                return [UnexportableAnswer(self.staying) for _ in ranks]
            case SnapshotCall():
                self.told = (call.epoch, {})
                for rid, (kv, blocks) in self.running.items():
                    if kv:
                        ahead = kv // call.unit * call.unit
                        self.told[1][rid] = (ahead, [rank[: ahead // self.page] for rank in blocks])
                told = [
                    CarriedRequest(
                        rid,
                        RequestKind.RUNNING,
                        self.running[rid][0],
                        self.running[rid][0] + 1,
                        self.most[rid],
                        None,
                        b"-",
                        ahead=ahead,
                    )
                    for rid, (ahead, _) in self.told[1].items()
                ]
                given = self._shrink(len(self.lease[0]) - max(0, len(self._free(0)) - call.leave))
                return [
                    SnapshotAnswer(
                        call.epoch,
                        told if rank == 0 else [],
                        [blocks[rank] for _, blocks in self.told[1].values()],
                        given[rank],
                    )
                    for rank in ranks
                ]
            case PrecopyCall():
                self.ahead = (call.epoch, {})
                for at, request in enumerate(call.requests):
                    assert request.state == b"-"
                    mine = [call.blocks[rank][at] for rank in ranks]
                    assert all(len(rank) == request.ahead // self.page for rank in mine)
                    self.ahead[1][request.rid] = (request.ahead, mine)
                return [PrecopyAnswer(call.epoch) for _ in ranks]
            case ExportCall():
                assert not self.leaving and not self.coming and not self.early, (
                    "a switch begins while requests are handed over"
                )
                if self.held is not None:
                    raise CallRefusedError(f"{self.spec}: requests are held already")
                # Each has a token more than a while ago, if it needs no block for it.
                grown = {rid: (kv + (kv % self.page > 0), blocks) for rid, (kv, blocks) in self.running.items()}
                self.held = (call.epoch, grown)
                self.running = {}
                pages = self._held_pages()
                for rank in ranks:
                    self.lease[rank] -= set(pages[rank])
                given = self._shrink(call.keep)
                told = self.told[1] if self.told[0] == call.epoch else {}
                carried, blocks = [], [[] for _ in ranks]
                for rid, (kv, pages_of) in self.held[1].items():
                    ahead, first = told.get(rid, (0, [[]]))
                    known = (
                        rid in told
                        and kv > 0
                        and all(rank[: len(first[0])] == then for rank, then in zip(pages_of, first, strict=True))
                    )
                    kind = RequestKind.RUNNING if kv else RequestKind.WAITING
                    carried.append(
                        CarriedRequest(
                            rid,
                            kind,
                            kv,
                            kv + 1,
                            self.most[rid],
                            None,
                            b"" if known else b"-",
                            delta=b"+" if known else b"",
                            ahead=ahead if known else 0,
                        )
                    )
                    for rank in ranks:
                        blocks[rank].append(pages_of[rank][len(first[0]) if known else 0 :])
                return [
                    ExportAnswer(
                        call.epoch, carried if rank == 0 else [], blocks[rank], pack_ids(pages[rank]), {}, given[rank]
                    )
                    for rank in ranks
                ]
            case AdoptCall():
                for at, request in enumerate(call.requests):
                    assert request.rid not in self.running
                    mine = [call.blocks[rank][at] for rank in ranks]
                    if not request.state or request.ahead:
                        assert self.ahead[0] == call.epoch
                        ahead, first = self.ahead[1].pop(request.rid)
                        assert ahead == request.ahead
                        mine = [[*rank, *rest] for rank, rest in zip(first, mine, strict=True)]
                    assert len(mine[0]) == -(-request.kv_tokens // self.page)
                    assert request.most_tokens <= SETTINGS.request_tokens[self.spec.tp]
                    self.most[request.rid] = request.most_tokens
                    self.running[request.rid] = (request.kv_tokens, mine)
                    for rank in ranks:
                        self._join(rank, mine[rank])
                for rank in ranks:
                    self._join(rank, unpack_ids(call.grow[rank]).tolist())
                return [AdoptAnswer(call.epoch, [request.rid for request in call.requests], []) for _ in ranks]
            case ReleaseCall():
                held = self._require(call.epoch)
                assert set(held) <= set(call.taken) | self.given_up
                aborted = sorted(self.given_up & set(call.taken))
                pages = self._held_pages()
                self.held, self.given_up = None, set()
                given = self._shrink(call.keep)
                return [ReleaseAnswer(call.epoch, pack_ids(pages[rank]), aborted, given[rank]) for rank in ranks]
            case RestoreCall():
                held = self._require(call.epoch)
                pages = self._held_pages()
                for rank in ranks:
                    self._join(rank, pages[rank])
                    self._join(rank, unpack_ids(call.grow[rank]).tolist() if call.grow else [])
                self.running |= held
                self.held = None
                restored = [rid for rid in held if rid not in self.given_up]
                return [RestoreAnswer(call.epoch, restored, pack_ids(pages[rank])) for rank in ranks]
        raise AssertionError(call)

    def _join(self, rank: int, pages: list[int]) -> None:
        assert not self.lease[rank] & set(pages), "a block that the engine has already"
        self.lease[rank] |= set(pages)

    def _require(self, epoch: int) -> dict[str, tuple[int, list[list[int]]]]:
        if self.held is None or self.held[0] != epoch:
            raise CallRefusedError(f"{self.spec}: nothing of epoch {epoch} is held")
        return self.held[1]

    def _held_pages(self) -> list[list[int]]:
        assert self.held is not None
        return [
            sorted(page for _, blocks in self.held[1].values() for page in blocks[rank]) for rank in range(self.spec.tp)
        ]

    def _shrink(self, keep: int | None) -> list[bytes]:
        given = []
        for rank in range(self.spec.tp):
            count = max(0, len(self.lease[rank]) - (keep or 0))
            out = sorted(self._free(rank))[:count]
            self.lease[rank] -= set(out)
            given.append(pack_ids(out))
        return given


class Node:
    """Two GPUs, three engines, all of them up; layout ONES.

    Attributes:
        faults: by engine and kind of call, e.g. ("tp1@0", "ExportCall"): one of FAULTS, for the next such call.
        during: likewise, what happens right before the engine does what it is asked.
        turns: likewise, how often the event loop turns before the answer is read; 1 unless told.
        outcomes: of each switch, where it went and what came of it.
    """

    def __init__(self, drain_timeout_s: float = 0.2, lengths: Lengths | None = None) -> None:
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
        handles = {gpu: region.handle for gpu, region in self._regions.items()}
        self.outcomes: list[str] = []
        self.modes = Modes(
            self.router,
            self.pools,
            SPECS,
            lambda: handles,
            drain_timeout_s,
            ended=lambda switch, outcome: self.outcomes.append(f"{switch.after}: {outcome}"),
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
        for rid in rids:
            fake.running[rid] = fake.coming.pop(rid)
        self.modes.handovers.noticed(name, to_plain(Arrived(rids)))
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
            case "recover":
                for one in payload["requests"]:
                    message = msgpack_decode(one["message"])
                    fake.take(message.rid, len(message.input_ids))
        return [{} for _ in SPECS[engine].gpus]

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
                self.read()
            await asyncio.sleep(0.005)
            self.read()

    def check(self) -> None:
        """Between switches: each request in one place, and every ledger as the engines have it."""
        self.pools.check()
        for name, spec in SPECS.items():
            if self.router.engines[name].state is EngineState.READY:
                assert self.pools.lease(spec) == [sorted(pages) for pages in self.fakes[name].lease], name
        if not self.modes.kept.exports:
            serving = self.router.layout.engines
            assert [self.pools.available(spec) for spec in serving] == [0] * len(serving), "blocks that nobody uses"
            assert all(
                self.pools.counts(spec)[0] == SETTINGS.standby_blocks for spec in SPECS.values() if spec not in serving
            ), "an engine outside the layout has more than it needs"
        holders = self.router.places.holders()
        places = Counter(rid for holder in holders for rid in holder.in_flight)
        assert all(count == 1 for count in places.values()), places
        assert {rid: holder.name for holder in holders for rid in holder.in_flight} == {
            rid: holder.name for rid, holder in self.router.places.where.items()
        }
        assert not self.router.moving.in_flight
        ended = self.ended()
        assert all(count == 1 for count in ended.values()), ended
        assert set(places) | set(ended) | set(self.router.waiting.paused) | set(self.router.long.waiting) == self.sent
        assert not set(places) & set(ended)
        for name, fake in self.fakes.items():
            held = {rid for hold, (rid, _, _) in fake.leaving.items() if hold not in fake.gone}
            assert {*fake.running, *held} == set(self.router.engines[name].in_flight), name
            assert not fake.coming
            goes = {going.number for going in self.modes.handovers._ahead.to(fake.spec)}
            assert set(fake.early) <= goes, "nobody knows of what came ahead"
            assert set(fake.leaving) == {hold for spec, hold in self.modes.handovers._waiting if spec.name == name}, (
                "held for nobody"
            )
        kept = {rid for export in self.modes.kept.exports.values() for rid in export.rids}
        held = {rid for fake in self.fakes.values() if fake.held is not None for rid in fake.held[1]}
        assert held == kept
        assert set(self.router.journal) == set(places)
        goes = [going for going in self.modes.handovers._ahead if going.tickets]
        for gpu, ledger in self.pools._ledgers.items():
            read = {b for going in goes for ticket in going.tickets for b in ticket.reads.get(gpu, ())}
            assert set(ledger._memory.copies.nonzero()[0]) == read, "a copy that never ends"

    def where(self) -> dict[str, list[str]]:
        return {name: sorted(fake.running) for name, fake in self.fakes.items() if fake.running}
