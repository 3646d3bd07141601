"""Single requests that go from an engine that prefills to one that decodes, while both serve.

A source says that requests have their first token, and holds them. They stay the source's, in `in_flight` and load,
so that it gets fewer new ones, until an engine is found that has room (`takers.py`). Then they are under way
(`moves.py`) until it has them, KV and all. What the sources are told is in `readers.py`.

Of a prompt that is read in parts, those that are done go ahead (`ahead.py`), to the engine that takes it over then.

What finds no room waits at its source, and goes on there after `MOST_WAIT_S`, and at once if no engine that decodes
holds all that it may come to have: a source that is full of such requests decodes them itself, so nothing can stand
still. If the taker dies, its requests are computed again from their tokens,
as any others of an engine that has died; if the source dies, a request on the move goes on at the taker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from sglang_adapt.core.handover import Arrived, HandoverNotice, NotArrived, PartRead, PartsStay, Prefilled
from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.keeper import KeeperError
from sglang_adapt.policy.roles import Rooms
from sglang_adapt.router.ahead import Ahead, Going
from sglang_adapt.router.calls import EngineCallError
from sglang_adapt.router.engine import Engine
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.mappings import Mappings
from sglang_adapt.router.moves import Ends, Moves, Prompt
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.readers import Readers
from sglang_adapt.router.router import Router
from sglang_adapt.router.takers import Takers
from sglang_adapt.router.tasks import Tasks
from sglang_adapt.router.told import Told

logger = logging.getLogger(__name__)

MOST_WAIT_S = 1.0
"""How long a request may wait at its source for room elsewhere; then it is decoded there."""


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
        self._mapping: set[EngineSpec] = set()
        self._settling = False
        self._tasks = Tasks()
        self.told = Told()
        self._takers = Takers(
            router,
            pools,
            specs,
            mappings,
            coming=lambda spec: self._moves.coming(spec),
            ahead=lambda spec: (going.length for going in self._ahead.to(spec)),
        )
        self._ahead = Ahead(router, pools, self._tasks, self._choose_ahead, self._came_back)
        self._readers = Readers(pools, self._up, self._tasks, self.told)
        ends = Ends(self._takers.full.add, self._back, self._place, blocks_came_back)
        self._moves = Moves(router, pools, self._up, self._tasks, self._ahead, self._readers, self.told, ends)

    @property
    def waiting(self) -> int:
        """Requests that wait at their sources for room."""
        return len(self._waiting)

    def said(self) -> dict[str, Any]:
        """For the control endpoint: requests that wait, are under way, and what has become of others; tokens that had
        gone ahead; and what took how long (`HandoverSteps`)."""
        under_way = sum(len(move.due) for move in self._moves)
        ahead = {"ahead_tokens": self.told.ahead_tokens} if self.told.ahead_tokens else {}
        steps = {"steps_ms": steps} if (steps := self.told.steps.said()) else {}
        return {"waiting": self.waiting, "under_way": under_way, **self.told.counts, **ahead, **steps}

    # What happens.

    def noticed(self, name: str, payload: dict[str, Any]) -> None:
        """An engine has said something unasked."""
        spec = self._specs[name]
        if not self._up.is_up(spec):
            # It died after that: what is to be done for its requests is done already.
            return
        match msgspec.convert(payload, HandoverNotice):
            case Prefilled(requests, holds, blocks, settled_s):
                deaths, now = self._pools.deaths(spec), monotonic()
                for request, hold, mine in zip(requests, holds, blocks, strict=True):
                    self._waiting[spec, hold] = Prompt(request, hold, spec, deaths, mine, now, settled_s)
                self._place()
                self._look_again()
            case PartRead() as part:
                if not self._settling and self._reads(spec):
                    self._ahead.read(spec, part)
            case PartsStay(rids):
                self._ahead.forget([going for going in self._ahead if going.source == spec and going.rid in rids])
            case Arrived() as arrived:
                self._moves.landed(spec, arrived)
            case NotArrived() as lost:
                self._moves.lost(spec, lost)

    def ended(self, engine: Engine) -> None:
        """A request of an engine has ended: there may be room for one that waits."""
        spec = self._specs.get(engine.name)
        if spec is not None:
            self._takers.full.discard(spec)
        self._ahead.prune()
        if self._waiting:
            self._place()

    def engine_lost(self, spec: EngineSpec) -> None:
        """An engine has died; the router has stranded its requests."""
        self._takers.full.discard(spec)
        self._moves.engine_lost(spec)
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
                self._readers.hand_over(spec)
            elif self._router.layout.roles and not self._mappings.has(spec) and spec not in self._mapping:
                self._mapping.add(spec)
                self._tasks.start(self._map(spec))
        self._readers.stop(still=self._reads)
        self._place()

    # A switch of layout.

    async def settle(self) -> None:
        """Until `resume` nothing is handed over: what is under way arrives, what waits goes on at its source, what went
        ahead is forgotten."""
        self._settling = True
        self._ahead.forget(self._ahead)
        self._readers.stop()
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
        rooms: Rooms | None = None
        now = monotonic()
        for prompt in list(self._waiting.values()):
            source = prompt.source
            if not self._up.is_same(source, prompt.deaths):
                pass
            elif prompt.rid not in self._router.engines[source.name].in_flight:
                forget.setdefault(source, []).append(prompt.hold)
                self._forget_ahead(prompt)
                self.told.add("given_up", 1)
            elif (taker := self._went_ahead(prompt)) is not None:
                # There is room for it; rooms are looked at only if someone needs them.
                if rooms is not None:
                    rooms = rooms.after(taker.name, prompt.request.length, ahead=True)
                moves.setdefault((source, taker), []).append(prompt)
            elif (taker := self._taker(prompt, rooms := rooms or self._rooms(moves))) is not None:
                rooms = rooms.after(taker.name, prompt.request.length, ahead=False)
                moves.setdefault((source, taker), []).append(prompt)
            elif self._stays(prompt, now):
                keep.setdefault(source, []).append(prompt.hold)
                self._forget_ahead(prompt)
            else:
                continue
            del self._waiting[source, prompt.hold]
        for (source, taker), prompts in moves.items():
            self._moves.begin(source, taker, prompts)
        for source, holds in forget.items():
            self._readers.forget(source, holds)
        for source, holds in keep.items():
            self._readers.keep(source, holds)
        self.told.waits(len(self._waiting))

    def _reads(self, spec: EngineSpec) -> bool:
        """Does an engine read prompts for others now?"""
        return self._router.roles.get(spec.name) is Role.PREFILL

    def _rooms(self, moves: Mapping[tuple[EngineSpec, EngineSpec], Sequence[Prompt]]) -> Rooms:
        """The room that there is beside requests that are about to move, and of which parts went ahead."""
        rooms = Rooms() if self._settling else self._takers.rooms()
        for (_, taker), prompts in moves.items():
            for prompt in prompts:
                rooms = rooms.after(taker.name, prompt.request.length, ahead=True)
        return rooms

    def _taker(self, prompt: Prompt, rooms: Rooms) -> EngineSpec | None:
        """Who takes a request over now."""
        if self._settling or not self._reads(prompt.source):
            return None
        return self._takers.choose(rooms, prompt.rid, prompt.request.length, prompt.request.most_tokens)

    def _went_ahead(self, prompt: Prompt) -> EngineSpec | None:
        """The engine to which parts of a request went ahead, if it takes requests over now."""
        if self._settling or not self._reads(prompt.source):
            return None
        going = self._ahead.of(prompt.source, prompt.deaths, prompt.rid)
        taker = None if going is None else going.taker
        return taker if taker is not None and self._takers.may_take(taker) else None

    def _stays(self, prompt: Prompt, now_s: float) -> bool:
        """Is a request that nobody takes over now decoded where it was read? Else it waits."""
        if self._settling or not self._reads(prompt.source):
            return True
        waited_s = now_s - prompt.since_s
        return waited_s >= self._most_wait_s or not self._takers.exists(prompt.rid, prompt.request.most_tokens)

    def _back(self, prompts: Sequence[Prompt]) -> None:
        """Requests wait at their source again."""
        self._waiting |= {(prompt.source, prompt.hold): prompt for prompt in prompts}
        self._look_again()

    def _look_again(self) -> None:
        """What waits now has waited long enough then."""
        if self._waiting:
            asyncio.get_running_loop().call_later(self._most_wait_s, self.wake)

    # What goes ahead.

    def _choose_ahead(self, going: Going) -> EngineSpec | None:
        if self._settling:
            return None
        return self._takers.choose_ahead(going.rid, going.length, going.most_tokens)

    def _forget_ahead(self, prompt: Prompt) -> None:
        going = self._ahead.of(prompt.source, prompt.deaths, prompt.rid)
        if going is not None:
            self._ahead.forget([going])

    def _came_back(self, taker: EngineSpec, source_died: bool) -> None:
        """A taker has forgotten what went ahead to it, or is gone: there are free blocks."""
        self._takers.full.discard(taker)
        if source_died:
            # Blocks that were read until now have come back only now.
            self._blocks_came_back()
        self._place()

    async def _map(self, spec: EngineSpec) -> None:
        """Let an engine that is to take requests over map what it will read."""
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
