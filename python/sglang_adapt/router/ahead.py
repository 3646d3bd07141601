"""What goes ahead of a hand-over while a prompt is being read: room for it, and the KV of parts that are done.

An engine that prefills tells of prompts and parts (`PartRead`); an engine with room for the whole request is chosen for
it at the first word, sets blocks of its own lease aside, and gets each part as it comes (`AheadCall`). When the prompt
has been read, `handovers` claims what went ahead, and only the rest is copied. Nothing here is needed: what does not
fit, or is given up on the way, is copied whole in the hand-over.

A taker says when it has begun to copy, not when it has ended, so the ledgers know a part as being read until the whole
request has arrived, or the taker has forgotten it (it waits for its copies then), or all its processes are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from sglang_adapt.core.handoff import KvSource
from sglang_adapt.core.handover import AheadCall, ForgetCall, PartRead
from sglang_adapt.core.layout import EngineSpec, Role
from sglang_adapt.kv.leases import CopyTicket
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.router.asking import ask_handover
from sglang_adapt.router.calls import CallRefusedError, EngineCallError
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.tasks import Tasks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Going:
    """A request of which parts go ahead.

    Attributes:
        rid: its id.
        source: the engine that reads it.
        deaths: how often that had died then.
        length: tokens that it will have when it is handed over.
        most_tokens: the most it may come to have.
        blocks: by rank of the source, of what has been read, in token order.
        number: by which the taker knows it.
        taker: who gets it; None as long as no engine has room for all of it.
        taker_deaths: as `deaths`.
        read: tokens that `blocks` hold.
        sent: of them, those that the taker has been told of.
        tickets: of the copies.
    """

    rid: str
    source: EngineSpec
    deaths: int
    length: int
    most_tokens: int
    blocks: list[list[int]]
    number: int
    taker: EngineSpec | None = None
    taker_deaths: int = 0
    read: int = 0
    sent: int = 0
    tickets: list[CopyTicket] = field(default_factory=list)

    def is_of(self, source: EngineSpec, deaths: int, rid: str) -> bool:
        return (self.source, self.deaths, self.rid) == (source, deaths, rid)

    def lies_in(self, blocks: list[list[int]]) -> bool:
        """Are these blocks, of the whole request, those that it was copied from?"""
        return all(mine == rank[: len(mine)] for mine, rank in zip(self.blocks, blocks, strict=True))


class Ahead:
    """See the module.

    Args:
        router: where requests are, and which engine has which role.
        pools: whose blocks are whose, and the way to the engines' ranks.
        tasks: where calls are under way.
        choose: the engine with room for all of a request; None if there is none.
        came_back: called with an engine that has free blocks again, and whether blocks of a source that has died may
            have come back as well.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        tasks: Tasks,
        choose: Callable[[Going], EngineSpec | None],
        came_back: Callable[[EngineSpec, bool], None],
    ) -> None:
        self._router = router
        self._up = Lives(router, pools)
        self._pools = pools
        self._tasks = tasks
        self._choose = choose
        self._came_back = came_back
        self._numbers = count(1)
        self._going: list[Going] = []

    def __iter__(self) -> Iterator[Going]:
        return iter(self._going)

    def of(self, source: EngineSpec, deaths: int, rid: str) -> Going | None:
        """What goes ahead of a request that an engine reads, or holds."""
        return next((going for going in self._going if going.is_of(source, deaths, rid)), None)

    def to(self, taker: EngineSpec) -> list[Going]:
        return [going for going in self._going if going.taker == taker]

    def read(self, source: EngineSpec, part: PartRead) -> None:
        """An engine that is up has read a part of a prompt."""
        deaths = self._pools.deaths(source)
        going = self.of(source, deaths, part.rid)
        if going is not None and (part.first != going.read or not part.end):
            # It is another request of that id, or begins anew.
            self.forget([going])
            going = None
        if part.rid not in self._router.engines[source.name].in_flight or (going is None and part.first):
            return
        if going is None:
            ranks: list[list[int]] = [[] for _ in source.gpus]
            going = Going(part.rid, source, deaths, part.length, part.most_tokens, ranks, next(self._numbers))
            self._going.append(going)
        for mine, new in zip(going.blocks, part.blocks, strict=True):
            mine += new
        going.read = part.end
        if going.taker is None and (taker := self._choose(going)) is not None:
            going.taker, going.taker_deaths = taker, self._pools.deaths(taker)
        if going.taker is not None:
            self._send(going, going.taker)

    def claim(
        self, source: EngineSpec, deaths: int, rid: str, taker: EngineSpec, blocks: list[list[int]]
    ) -> Going | None:
        """What went ahead of a request that has been read and goes to a taker now; it is the caller's from here on,
        who ends its copies (`arrived`) or gives it up (`drop`). What went to another engine is forgotten.

        Args:
            blocks: by rank of the source, the whole request's.
        """
        going = self.of(source, deaths, rid)
        if going is None:
            return None
        if going.taker != taker or self._pools.deaths(taker) != going.taker_deaths:
            self.forget([going])
            return None
        if not going.lies_in(blocks):
            logger.error("%s: %s lies in other blocks than it was copied from; it is copied whole", source, rid)
            self.forget([going])
            return None
        self._going.remove(going)
        return going

    def forget(self, going: Iterable[Going]) -> None:
        """Nothing follows: takers free their blocks."""
        for one in list(going):
            self._going.remove(one)
            self.drop(one)

    def drop(self, going: Going) -> None:
        """The same of what was claimed."""
        if going.taker is not None:
            self._tasks.start(self._drop(going, going.taker))

    def prune(self) -> None:
        """Forget what has lost its reason: requests that ended, engines that died or have other roles."""
        self.forget([going for going in self._going if not self._goes_on(going)])

    def arrived(self, going: Going) -> None:
        """All of what was claimed is there, or its taker is gone: nothing copies any more."""
        for ticket in going.tickets:
            self._pools.end_copy(ticket)
        going.tickets.clear()

    def _goes_on(self, going: Going) -> bool:
        roles, source = self._router.roles, going.source.name
        if not self._up.is_same(going.source, going.deaths) or roles.get(source) is not Role.PREFILL:
            return False
        if going.taker is not None:
            role = roles.get(going.taker.name)
            if not self._up.is_same(going.taker, going.taker_deaths) or role is None or role is Role.PREFILL:
                return False
        return going.rid in self._router.engines[source].in_flight

    def _send(self, going: Going, taker: EngineSpec) -> None:
        """Let a taker have what it has not been told of yet."""
        page = self._pools.settings.geometry.tokens_per_block(going.source.tp)
        blocks = [mine[going.sent // page :] for mine in going.blocks]
        reads = dict(zip(going.source.gpus, blocks, strict=True))
        try:
            if any(blocks):
                going.tickets.append(self._pools.begin_reading(reads))
        except LedgerError as error:
            # The source has named blocks that are not its own: nobody knows what it holds.
            self.forget([going])
            self._pools.kill(going.source, str(error))
            return
        source = KvSource(list(going.source.gpus), blocks)
        call = AheadCall(going.number, going.rid, going.sent, going.read, going.length, source)
        going.sent = going.read
        self._tasks.start(self._bring(going, taker, call))

    async def _bring(self, going: Going, taker: EngineSpec, call: AheadCall) -> None:
        try:
            await ask_handover(self._pools, taker, call)
        except CallRefusedError as error:
            logger.info("%s goes ahead no further: %s", going.rid, error)
        except EngineCallError as error:
            logger.info("%s: %s", taker, error)
        except Exception:
            logger.exception("bringing %s ahead to %s broke off", going.rid, taker)
        else:
            return
        if going in self._going:
            # Later parts are not sent either: only one that begins anew is a first one.
            self.forget([going])

    async def _drop(self, going: Going, taker: EngineSpec) -> None:
        try:
            if self._pools.deaths(taker) == going.taker_deaths:
                await ask_handover(self._pools, taker, ForgetCall([going.number]))
        except Exception as error:
            if not isinstance(error, EngineCallError):
                logger.exception("%s: what came ahead of %s was to be forgotten", taker, going.rid)
            if self._up.is_same(taker, going.taker_deaths):
                # Nobody knows whether it still copies.
                self._pools.kill(taker, str(error))
            await self._pools.gone(taker, going.taker_deaths)
        self.arrived(going)
        self._came_back(taker, self._pools.deaths(going.source) != going.deaths)
