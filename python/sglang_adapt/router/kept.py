"""Requests that are kept paused, blocks and all, at engines outside the layout, and how they give way.

What they hold is not there for the engines that serve. So that each request there finds the room that was promised when
it was accepted, those kept on its GPUs are let go as soon as an engine has one that needs their blocks, whoever ordered
that they be kept: they lose their KV, and go on from their tokens at the engines that serve. One that is too long for
these waits for a layout that holds it, as it did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.sizing import longest_request
from sglang_adapt.policy.lengths import longest
from sglang_adapt.policy.pausing import Needy, must_yield
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Export
from sglang_adapt.router.tasks import Tasks
from sglang_adapt.upstream import wire
from sglang_adapt.upstream.kv_pool import look_ahead_tokens

logger = logging.getLogger(__name__)


class Kept:
    """See the module.

    Args:
        router: where requests are.
        pools: whose blocks are whose.
        specs: all candidates by name.
        may_let_go: False while a switch moves requests and blocks; it looks again itself when it is done.
        release: lets an engine forget what it has handed out, and gives its blocks to the layout's engines.

    Attributes:
        exports: what is kept, by engine.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        specs: Mapping[str, EngineSpec],
        may_let_go: Callable[[], bool],
        release: Callable[[Export, str], Awaitable[None]],
    ) -> None:
        self._router = router
        self._pools = pools
        self._specs = specs
        self._may_let_go = may_let_go
        self._release = release
        self._ahead = look_ahead_tokens()
        self.exports: dict[EngineSpec, Export] = {}
        self._new: list[str] = []
        self._tasks = Tasks()

    def taken(self, rid: str) -> None:
        """An engine has got a request: look, a moment later, whether what is kept leaves room for it."""
        if not self._new:
            asyncio.get_running_loop().call_soon(self._look)
        self._new.append(rid)

    def _look(self) -> None:
        rids, self._new = self._new, []
        self.make_room(rids)

    def make_room(self, rids: Iterable[str] | None = None) -> None:
        """Let go what holds blocks that requests need, now or soon; of all that run, if none are named.

        To be called now and then for all, too, because requests grow: by less than stock looks ahead, in between.
        """
        if not self.exports or not self._may_let_go():
            return
        wanted = None if rids is None else set(rids)
        running = [
            one
            for spec in self._router.layout.engines
            for one in self._running(spec)
            if wanted is None or one.rid in wanted
        ]
        for name, needy in must_yield(running, {spec.name: tuple(spec.gpus) for spec in self.exports}).items():
            self.let_go([self._specs[name]], f"request {needy.rid} of {needy.tokens} tokens needs their blocks")

    def _running(self, spec: EngineSpec) -> list[Needy]:
        """The requests of an engine that serves."""
        router, settings = self._router, self._pools.settings
        leased = self._pools.counts(spec)[0] + self._pools.available(spec)
        room = longest_request(leased, settings.geometry.tokens_per_block(spec.tp))
        limit, limits, gpus = settings.request_tokens[spec.tp], list(settings.request_tokens.values()), tuple(spec.gpus)
        found = []
        for rid in router.engines[spec.name].in_flight:
            entry = router.journal[rid]
            most = min(limit, longest(entry.tokens, wire.asked_output(entry.data), limits))
            now = entry.tokens + len(entry.ids)
            found.append(Needy(rid, gpus, min(most, now + self._ahead), room))
        return found

    def let_go(self, specs: Iterable[EngineSpec], why: str) -> None:
        """What these engines keep goes on elsewhere, from its tokens."""
        for spec in specs:
            self._tasks.start(self._let_go(self.exports.pop(spec), why))

    async def _let_go(self, export: Export, why: str) -> None:
        rids = self._router.unkeep(self._router.engines[export.spec.name])
        logger.info("%s: %d requests that it has kept go on from their tokens: %s", export.spec, len(rids), why)
        self._router.lay_down(rids, why)
        await self._release(export, why)

    async def settled(self) -> None:
        """Wait until nothing is being let go."""
        while self._tasks:
            await self._tasks.wait()
