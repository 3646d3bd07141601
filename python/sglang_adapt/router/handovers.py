"""Single requests that go from an engine that prefills to one that decodes, while both serve.

A source says that requests have their first token, and holds them. They stay the source's, in `in_flight` and load,
so that it gets fewer new ones, until an engine is found that has room (`policy.roles.choose_taker`). Then they are on
the move for one call (`TakeOverCall`), and the taker's from its answer on. When it says that their KV has arrived, the
source lets go. The ledgers know the copy from before the call until then, so that blocks of a source that dies
meanwhile are given to nobody.

Of a prompt that is read in parts, those that are done go ahead (`ahead.py`), to the engine that takes it over then.

What finds no room waits at its source, and goes on there after `MOST_WAIT_S`, and at once if no engine that decodes
holds all that it may come to have: a source that is full of such requests decodes them itself, so nothing can stand
still. If the taker dies, its requests are computed again from their tokens,
as any others of an engine that has died; if the source dies, a request on the move goes on at the taker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from sglang_adapt.core.handoff import CarriedRequest, KvSource
from sglang_adapt.core.handover import (
    Arrived,
    HandoverAnswer,
    HandoverCall,
    HandoverNotice,
    KeepCall,
    LeaveCall,
    LetGoCall,
    PartRead,
    PartsStay,
    Prefilled,
    TakeOverCall,
)
from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.keeper import KeeperError
from sglang_adapt.kv.leases import CopyTicket
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.policy.roles import Taker, choose_taker
from sglang_adapt.router.ahead import Ahead, Going
from sglang_adapt.router.asking import ask_handover
from sglang_adapt.router.calls import CallRefusedError, EngineCallError, EngineGoneError
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.mappings import Mappings
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.tasks import Tasks

logger = logging.getLogger(__name__)

MOST_WAIT_S = 1.0
"""How long a request may wait at its source for room elsewhere; then it is decoded there."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request that has its first token, held by the engine that gave it.

    Attributes:
        hold: the number by which the engine holds it.
        deaths: how often the engine had died then.
        blocks: by rank of the source, in token order.
        since_s: when the router was told, by `time.monotonic`.
    """

    request: CarriedRequest
    hold: int
    source: EngineSpec
    deaths: int
    blocks: list[list[int]]
    since_s: float

    @property
    def rid(self) -> str:
        return self.request.rid


@dataclass(eq=False)
class _Move:
    """Requests under way from one engine to another."""

    source: EngineSpec
    taker: EngineSpec
    prompts: list[Prompt]
    deaths: int
    due: set[str]
    arrived: asyncio.Future[None]
    ahead: list[Going | None]

    @property
    def holds(self) -> list[int]:
        return [prompt.hold for prompt in self.prompts]


@dataclass
class Told:
    """What has become of requests so far, for `Handovers.said` and the metrics.

    Attributes:
        counts: `handed_over`, `kept` (decoded where they were prefilled, for want of room or of roles), `recomputed`
            (their taker died) and `given_up` (by their clients, on the way).
        ahead_tokens: of those handed over, tokens whose KV had gone ahead.
        count: called with an outcome and how many requests it had.
        took: called with the seconds of each hand-over, from the source's word to the taker's answer.
        waits: called with how many requests wait for room now.
    """

    counts: Counter[str] = field(default_factory=Counter)
    ahead_tokens: int = 0
    count: Callable[[str, int], None] = lambda outcome, requests: None
    took: Callable[[float], None] = lambda seconds: None
    waits: Callable[[int], None] = lambda requests: None

    def add(self, outcome: str, requests: int) -> None:
        if requests:
            self.counts[outcome] += requests
            self.count(outcome, requests)


class Handovers:
    """See the module.

    Args:
        router: where requests are, and which engine has which role.
        pools: whose blocks are whose, and the way to the engines' ranks.
        specs: all candidates by name.
        mappings: which engines can read the KV of all GPUs.
        blocks_came_back: called when there are free blocks for the layout's engines.
        most_wait_s: see `MOST_WAIT_S`.

    Attributes:
        told: what has become of requests.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        mappings: Mappings,
        blocks_came_back: Callable[[], None],
        most_wait_s: float = MOST_WAIT_S,
    ) -> None:
        self._router = router
        self._up = Lives(router, pools)
        self._pools = pools
        self._specs = specs
        self._mappings = mappings
        self._blocks_came_back = blocks_came_back
        self._most_wait_s = most_wait_s
        self._waiting: dict[tuple[EngineSpec, int], Prompt] = {}
        self._moves: list[_Move] = []
        self._leaving: dict[EngineSpec, tuple[int, bool]] = {}
        self._full: set[EngineSpec] = set()
        self._mapping: set[EngineSpec] = set()
        self._settling = False
        self._tasks = Tasks()
        self._ahead = Ahead(router, pools, self._tasks, self._choose_ahead, self._came_back)
        self.told = Told()

    @property
    def waiting(self) -> int:
        """Requests that wait at their sources for room."""
        return len(self._waiting)

    def said(self) -> dict[str, int]:
        """For the control endpoint: requests that wait, are under way, and what has become of others; tokens that had
        gone ahead."""
        under_way = sum(len(move.due) for move in self._moves)
        ahead = {"ahead_tokens": self.told.ahead_tokens} if self.told.ahead_tokens else {}
        return {"waiting": self.waiting, "under_way": under_way, **self.told.counts, **ahead}

    # What happens.

    def noticed(self, name: str, payload: dict[str, Any]) -> None:
        """An engine has said something unasked."""
        spec = self._specs[name]
        if not self._up.is_up(spec):
            # It died after that: what is to be done for its requests is done already.
            return
        match msgspec.convert(payload, HandoverNotice):
            case Prefilled(requests, holds, blocks):
                deaths, now = self._pools.deaths(spec), monotonic()
                for request, hold, mine in zip(requests, holds, blocks, strict=True):
                    self._waiting[spec, hold] = Prompt(request, hold, spec, deaths, mine, now)
                self._place()
                self._look_again()
            case PartRead() as part:
                if not self._settling and self._router.roles.get(name) is Role.PREFILL:
                    self._ahead.read(spec, part)
            case PartsStay(rids):
                self._ahead.forget([going for going in self._ahead if going.source == spec and going.rid in rids])
            case Arrived(rids):
                for move in [move for move in self._moves if move.taker == spec]:
                    move.due.difference_update(rids)
                    if not move.due and not move.arrived.done():
                        move.arrived.set_result(None)

    def ended(self, engine: Engine) -> None:
        """A request of an engine has ended: there may be room for one that waits."""
        spec = self._specs.get(engine.name)
        if spec is not None:
            self._full.discard(spec)
        self._ahead.prune()
        if self._waiting:
            self._place()

    def engine_lost(self, spec: EngineSpec) -> None:
        """An engine has died; the router has stranded its requests."""
        self._full.discard(spec)
        for move in self._moves:
            if move.taker == spec and not move.arrived.done():
                move.arrived.set_exception(EngineGoneError(f"{spec} died before the KV had arrived"))
        self._ahead.prune()
        self.wake()

    def wake(self) -> None:
        """Roles, engines or time have changed: tell sources what they are, and place what waits."""
        if self._settling:
            return
        self._ahead.prune()
        for name, role in self._router.roles.items():
            spec = self._specs[name]
            if not self._up.is_up(spec):
                continue
            if role is Role.PREFILL:
                self._let_leave(spec, True)
            elif self._router.layout.roles and not self._mappings.has(spec) and spec not in self._mapping:
                self._mapping.add(spec)
                self._tasks.start(self._map(spec))
        for spec in list(self._leaving):
            if self._router.roles.get(spec.name) is not Role.PREFILL:
                self._let_leave(spec, False)
        self._place()

    # A switch of layout.

    async def settle(self) -> None:
        """Until `resume` nothing is handed over: what is under way arrives, what waits goes on at its source, what went
        ahead is forgotten."""
        self._settling = True
        self._ahead.forget(self._ahead)
        for spec in list(self._leaving):
            self._let_leave(spec, False)
        while self._tasks or self._waiting:
            # After a source's answer there is no further word from it.
            self._place()
            await self._tasks.wait()

    def resume(self) -> None:
        """The layout that serves from now on is known."""
        self._settling = False
        self.wake()

    # Where requests go.

    def _place(self) -> None:
        """Let each request that waits go where it can go now."""
        moves: dict[tuple[EngineSpec, EngineSpec], list[Prompt]] = {}
        keep: dict[EngineSpec, list[int]] = {}
        forget: dict[EngineSpec, list[int]] = {}
        takers = self._takers() if self._waiting else {}
        pressed = self._takers(ahead=False) if self._waiting else {}
        now = monotonic()
        for prompt in list(self._waiting.values()):
            source = prompt.source
            if not self._lives(prompt):
                pass
            elif prompt.rid not in self._engine(source).in_flight:
                forget.setdefault(source, []).append(prompt.hold)
                self._forget_ahead(prompt)
                self.told.add("given_up", 1)
            elif (taker := self._taker(prompt, takers, pressed)) is not None:
                moves.setdefault((source, taker), []).append(prompt)
            elif (
                self._settling
                or self._router.roles.get(source.name) is not Role.PREFILL
                or not self._may_ever_go(prompt)
                or now - prompt.since_s >= self._most_wait_s
            ):
                keep.setdefault(source, []).append(prompt.hold)
                self._forget_ahead(prompt)
            else:
                continue
            del self._waiting[source, prompt.hold]
        for (source, taker), prompts in moves.items():
            self._begin(source, taker, prompts)
        for source, holds in forget.items():
            self._tasks.start(self._ask_source(source, LetGoCall(holds)))
        for source, holds in keep.items():
            self._tasks.start(self._keep(source, holds))
        self.told.waits(len(self._waiting))

    def _takers(self, ahead: bool = True) -> dict[str, Taker]:
        """The engines that can take requests over now; their room with or without what goes ahead to them."""
        takers = {}
        for name in self._router.roles:
            spec, engine = self._specs[name], self._router.engines[name]
            if spec in self._full or not self._may_take(spec):
                continue
            page = self._pools.settings.geometry.tokens_per_block(spec.tp)
            coming = [prompt for move in self._moves if move.taker == spec for prompt in move.prompts]
            on_the_way = [prompt.request.length for prompt in coming if prompt.rid in self._router.moving.in_flight]
            on_the_way += [going.length for going in self._ahead.to(spec)] if ahead else []
            held = sum(engine.in_flight.values()) + sum(len(self._router.journal[rid].ids) for rid in engine.in_flight)
            requests = len(engine.in_flight) + len(on_the_way)
            takers[name] = Taker(name, page, self._pools.counts(spec)[0], held + sum(on_the_way), requests)
        return takers

    def _may_take(self, spec: EngineSpec) -> bool:
        """Does an engine take requests over now, if it has room?"""
        role = self._router.roles.get(spec.name)
        ready = self._router.engines[spec.name].state is EngineState.READY and self._mappings.has(spec)
        return ready and not self._settling and role is not None and role is not Role.PREFILL

    def _taker(self, prompt: Prompt, takers: dict[str, Taker], pressed: dict[str, Taker]) -> EngineSpec | None:
        """Who takes a request over; its room is noted.

        Args:
            takers, pressed: with and without what goes ahead of requests that are still being read. Those make way
                where nobody else has room.
        """
        if self._router.roles.get(prompt.source.name) is not Role.PREFILL:
            return None
        request = prompt.request
        going = self._ahead.of(prompt.source, prompt.deaths, prompt.rid)
        if going is not None and going.taker is not None and self._may_take(going.taker):
            if going.taker.name in pressed:
                pressed[going.taker.name] = pressed[going.taker.name].after(request.length)
            return going.taker
        for rooms in (takers, pressed):
            taker = self._choose(prompt.rid, request.length, request.most_tokens, rooms)
            if taker is not None:
                takers[taker.name] = takers[taker.name].after(request.length)
                pressed[taker.name] = pressed[taker.name].after(request.length)
                return taker
        return None

    def _choose_ahead(self, going: Going) -> EngineSpec | None:
        return self._choose(going.rid, going.length, going.most_tokens, self._takers())

    def _choose(self, rid: str, length: int, most_tokens: int, takers: dict[str, Taker]) -> EngineSpec | None:
        room = [taker for taker in takers.values() if self._holds(taker.name, rid, most_tokens)]
        taker = choose_taker(room, length, self._within_targets(rid, [taker.name for taker in room]))
        return None if taker is None else self._specs[taker.name]

    def _holds(self, name: str, rid: str, most_tokens: int) -> bool:
        """Has an engine room for all that a request may come to have, prompt and output?"""
        limit = self._pools.settings.request_tokens[self._specs[name].tp]
        return most_tokens <= limit and self._router.long.holds(name, rid)

    def _may_ever_go(self, prompt: Prompt) -> bool:
        """Is there an engine that decodes and holds a request, whether or not it has room now?"""
        roles = self._router.roles.items()
        rid, most = prompt.rid, prompt.request.most_tokens
        return any(role is not Role.PREFILL and self._holds(name, rid, most) for name, role in roles)

    def _within_targets(self, rid: str, names: Collection[str]) -> Collection[str]:
        """Those of its tier that keep a request's target, and those of what they have."""
        admission = self._router.admission
        return (
            names if admission is None else admission.decode_within(rid, [self._router.engines[one] for one in names])
        )

    def _begin(self, source: EngineSpec, taker: EngineSpec, prompts: list[Prompt]) -> None:
        """Requests are on the move from here on."""
        rids = [prompt.rid for prompt in prompts]
        try:
            ticket = self._begin_copy(prompts)
        except LedgerError as error:
            # The source has named blocks that are not its own: nobody knows what it holds.
            self._pools.kill(source, str(error))
            return
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ahead = [self._ahead.claim(source, prompt.deaths, prompt.rid, taker, prompt.blocks) for prompt in prompts]
        move = _Move(source, taker, prompts, self._pools.deaths(taker), set(rids), arrived, ahead)
        self._moves.append(move)
        self._router.detach(self._engine(source), rids)
        self._tasks.start(self._move(move, ticket))

    async def _move(self, move: _Move, ticket: CopyTicket) -> None:
        """Bring requests from one engine to another."""
        try:
            await self._take_over(move, ticket)
        except Exception as error:
            # A fault in this program: nobody knows what the engines hold.
            logger.exception("handing requests over from %s to %s broke off", move.source, move.taker)
            self._recompute([prompt.rid for prompt in move.prompts], str(error))
            for spec in (move.source, move.taker):
                if self._up.is_up(spec):
                    self._pools.kill(spec, "handing requests over broke off")
            await self._gone(move)
            self._end_copy(move, ticket)
        finally:
            self._moves.remove(move)
        self._place()

    async def _take_over(self, move: _Move, ticket: CopyTicket) -> None:
        router = self._router
        rids = [prompt.rid for prompt in move.prompts]
        sources = [KvSource(list(move.source.gpus), prompt.blocks) for prompt in move.prompts]
        numbers = [0 if going is None else going.number for going in move.ahead]
        try:
            call = TakeOverCall([prompt.request for prompt in move.prompts], sources, numbers)
            answers = await ask_handover(self._pools, move.taker, call)
        except CallRefusedError as error:
            logger.info("%s takes over nothing for now: %s", move.taker, error)
            ahead, move.ahead = move.ahead, []
            self._end_copy(move, ticket)
            self._full.add(move.taker)
            for going in filter(None, ahead):
                self._ahead.drop(going)
            self._back_to_source(move, str(error))
            return
        except EngineCallError as error:
            self._recompute(rids, str(error))
            await self._gone(move)
            self._end_copy(move, ticket)
            await self._ask_source(move.source, LetGoCall(move.holds), move.prompts[0].deaths)
            return
        now = monotonic()
        for prompt in move.prompts:
            self.told.took(now - prompt.since_s)
        self.told.add("handed_over", len(rids))
        self.told.ahead_tokens += answers[0].ahead_tokens
        router.arrive(self._engine(move.taker), rids)
        try:
            await move.arrived
        except EngineGoneError:
            await self._gone(move)
        self._end_copy(move, ticket)
        await self._ask_source(move.source, LetGoCall(move.holds), move.prompts[0].deaths)

    def _back_to_source(self, move: _Move, why: str) -> None:
        """Nothing has changed but time: the requests wait at their source again."""
        rids = [prompt.rid for prompt in move.prompts]
        if not self._lives(move.prompts[0]):
            self._recompute(rids, f"{move.source} died, and {why}")
            return
        self._router.arrive(self._engine(move.source), rids)
        self._waiting |= {(move.source, prompt.hold): prompt for prompt in move.prompts}
        self._look_again()

    def _look_again(self) -> None:
        """What waits now has waited long enough then."""
        if self._waiting:
            asyncio.get_running_loop().call_later(self._most_wait_s, self.wake)

    def _recompute(self, rids: Sequence[str], why: str) -> None:
        there = [rid for rid in rids if rid in self._router.moving.in_flight]
        self.told.add("recomputed", len(there))
        self._router.strand(self._router.moving, there, why)
        self._router.carry_out_aborts(there)

    async def _gone(self, move: _Move) -> None:
        """Wait until nothing copies any more: the taker's processes do that."""
        await self._pools.gone(move.taker, move.deaths)

    def _begin_copy(self, prompts: Sequence[Prompt]) -> CopyTicket:
        """Note what is read. What is written is the taker's, and nobody else's before all its processes are gone."""
        reads: dict[int, list[int]] = {}
        for prompt in prompts:
            for gpu, blocks in zip(prompt.source.gpus, prompt.blocks, strict=True):
                reads.setdefault(gpu, []).extend(blocks)
        return self._pools.begin_reading(reads)

    def _end_copy(self, move: _Move, ticket: CopyTicket) -> None:
        self._pools.end_copy(ticket)
        for going in filter(None, move.ahead):
            self._ahead.arrived(going)
        if self._pools.deaths(move.source) != move.prompts[0].deaths:
            # Blocks that were read until now have come back only now.
            self._blocks_came_back()

    def _forget_ahead(self, prompt: Prompt) -> None:
        going = self._ahead.of(prompt.source, prompt.deaths, prompt.rid)
        if going is not None:
            self._ahead.forget([going])

    def _came_back(self, taker: EngineSpec, source_died: bool) -> None:
        """A taker has forgotten what went ahead to it, or is gone: there are free blocks."""
        self._full.discard(taker)
        if source_died:
            # Blocks that were read until now have come back only now.
            self._blocks_came_back()
        self._place()

    async def _keep(self, source: EngineSpec, holds: Sequence[int]) -> None:
        """Let a source go on with requests; those given up meanwhile it forgets."""
        answers = await self._ask_source(source, KeepCall(list(holds)))
        if answers is None:
            return
        kept = answers[0].kept
        self.told.add("kept", len(kept))
        gone = [hold for hold in holds if hold not in kept]
        if gone:
            self.told.add("given_up", len(gone))
            await self._ask_source(source, LetGoCall(gone))

    def _let_leave(self, spec: EngineSpec, on: bool) -> None:
        """Tell an engine whether it hands requests over, if it does not know."""
        deaths = self._pools.deaths(spec)
        if self._leaving.get(spec, (deaths, False)) == (deaths, on):
            return
        if on:
            self._leaving[spec] = (deaths, True)
        else:
            known = self._leaving.pop(spec, None)
            if known is None or known[0] != deaths or not self._up.is_up(spec):
                return
        self._tasks.start(self._tell(spec, LeaveCall(on, self._pools.unit_tokens if on else 0)))

    async def _tell(self, spec: EngineSpec, call: LeaveCall) -> None:
        if await self._ask_source(spec, call) is not None:
            logger.info(
                "%s %s", spec, "hands requests over when it has prefilled them" if call.on else "is mixed again"
            )

    async def _map(self, spec: EngineSpec) -> None:
        try:
            await self._mappings.map(spec)
        except (EngineCallError, KeeperError) as error:
            # It takes over nothing until it is asked again.
            logger.error("%s takes over no requests: %s", spec, error)
            return
        except Exception:
            # A fault in this program.
            logger.exception("%s takes over no requests", spec)
            return
        finally:
            self._mapping.discard(spec)
        self._place()

    async def _ask_source(
        self, spec: EngineSpec, call: HandoverCall, deaths: int | None = None
    ) -> list[HandoverAnswer] | None:
        """Ask an engine that holds requests; None if it has died, once more than `deaths` times."""
        if deaths is not None and self._pools.deaths(spec) != deaths:
            return None
        try:
            return await ask_handover(self._pools, spec, call)
        except CallRefusedError as error:
            # It holds requests that nobody can account for.
            self._pools.kill(spec, str(error))
        except EngineCallError as error:
            logger.info("%s: %s", spec, error)
        return None

    def _lives(self, prompt: Prompt) -> bool:
        """Does its source still hold it?"""
        return self._up.is_same(prompt.source, prompt.deaths)

    def _engine(self, spec: EngineSpec) -> Engine:
        return self._router.engines[spec.name]
