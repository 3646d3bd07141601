"""Where each request is that an engine has, had, or is to have: in flight there, on the move, stranded, or kept paused.

The last three are engines in name only: what they are sent are aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from sglang_adapt.router.admission import Admission
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.journal import Entry
from sglang_adapt.router.long_requests import LongRequests
from sglang_adapt.router.serving import Serving
from sglang_adapt.upstream import wire


class Places:
    """See the module.

    Invariant: a request id is in `in_flight` of exactly the engine that `where` names, from `hold` to `end`. `journal`
    has an entry for each, made by who sends it.

    Args:
        serving: the engines, told of their load.
        long: told when a request has ended.
        admission: told where requests are; None without tiers.
        aborted: called with the answer to a request that no engine runs and its client has given up.
        taken: called with a request that an engine has now, while others are kept paused.
        ended: called with an engine whose request has ended, or gone.

    Attributes:
        where: the holder of each request.
        moving: requests on the move.
        stranded: requests whose engine has died.
        journal: message and tokens of each.
    """

    def __init__(
        self,
        serving: Serving,
        long: LongRequests,
        admission: Admission | None,
        aborted: Callable[[bytes], None],
        taken: Callable[[str], None],
        ended: Callable[[Engine], None],
    ) -> None:
        self._serving = serving
        self._long = long
        self._admission = admission
        self._aborted = aborted
        self._taken = taken
        self._ended = ended
        self.where: dict[str, Engine] = {}
        self.journal: dict[str, Entry] = {}
        self.moving = Engine("moving", send=self._hold_abort, state=EngineState.READY)
        self.stranded = Engine(
            "stranded", send=lambda data: self._abort_in(self.stranded, data), state=EngineState.READY
        )
        self._kept: dict[str, Engine] = {}
        self._held_aborts: list[str] = []
        self._waiters: list[tuple[set[str], asyncio.Future[None]]] = []

    def holders(self) -> list[Engine]:
        """All that can have requests."""
        return [*self._serving.engines.values(), self.moving, self.stranded, *self._kept.values()]

    # From holder to holder.

    def hold(self, holder: Engine, rid: str, tokens: int) -> None:
        """A request is a holder's from now on."""
        holder.in_flight[rid] = tokens
        if rid not in self.journal or not self.journal[rid].ids:
            holder.unread[rid] = tokens
        self.where[rid] = holder
        if self._admission is not None:
            self._admission.moved(rid, holder.name, tokens)
        if self._kept and holder.name in self._serving.engines:
            self._taken(rid)

    def hand_over(self, giver: Engine, taker: Engine, rids: Iterable[str]) -> None:
        """Those of these requests that the giver has are the taker's."""
        for rid in rids:
            tokens = giver.in_flight.pop(rid, None)
            if tokens is None:
                continue
            self._serving.release(giver.name, giver.unread.pop(rid, 0))
            self.hold(taker, rid, tokens)
            self._serving.assign(taker.name, taker.unread.get(rid, 0))

    def read(self, engine: Engine, rid: str) -> None:
        """A request of an engine has given its first token."""
        tokens = engine.unread.pop(rid, None)
        if tokens is not None:
            self._serving.read(engine.name, tokens)

    def take_back(self, rid: str) -> None:
        """A stranded request is nowhere; its entry in the journal stays, and its record."""
        del self.stranded.in_flight[rid]
        self.stranded.unread.pop(rid, None)
        del self.where[rid]
        if self._admission is not None:
            self._admission.left(rid)

    def keep(self, engine: Engine, rids: Iterable[str]) -> None:
        """Requests on the move stay paused at an engine, until `unkeep`. An abort ends them at once."""
        name = engine.name
        if name not in self._kept:
            self._kept[name] = Engine(f"kept at {name}", send=lambda data: self._abort_in(self._kept[name], data))
            self._kept[name].state = EngineState.READY
        self.hand_over(self.moving, self._kept[name], rids)

    def unkeep(self, engine: Engine) -> list[str]:
        """Requests kept at an engine are on the move again; returns the ids of those whose clients still wait."""
        holder = self._kept.pop(engine.name, None)
        rids = [] if holder is None else list(holder.in_flight)
        if holder is not None:
            self.hand_over(holder, self.moving, rids)
        return rids

    # Aborts of what no engine runs now.

    def take_aborts(self, rids: Iterable[str] | None = None) -> list[str]:
        """Aborts that came for requests on the move, of these or of all; they are the caller's to carry out."""
        wanted = None if rids is None else set(rids)
        taken = [rid for rid in self._held_aborts if wanted is None or rid in wanted]
        self._held_aborts = [rid for rid in self._held_aborts if wanted is not None and rid not in wanted]
        return taken

    def _hold_abort(self, data: bytes) -> None:
        self._held_aborts += _meant(self.moving, data)

    def _abort_in(self, holder: Engine, data: bytes) -> None:
        for rid in _meant(holder, data):
            self.end(holder, rid)
            self._aborted(wire.encode_abort(rid))

    # The end.

    def end(self, engine: Engine, rid: str) -> None:
        """A request of an engine has ended, if it was there."""
        if rid in self.moving.in_flight:
            # The engine that took it up has ended it before it was handed over to it here.
            engine = self.moving
        tokens = engine.in_flight.pop(rid, None)
        if tokens is None:
            return
        del self.where[rid]
        del self.journal[rid]
        self._long.ended(rid)
        if self._admission is not None:
            self._admission.left(rid)
            self._admission.ended(rid, None, finished=False)
        self._serving.release(engine.name, engine.unread.pop(rid, 0))
        if self._waiters:
            self._tell_waiters(rid)
        self._ended(engine)

    async def until_ended(self, rids: Iterable[str]) -> None:
        """Wait until none of these requests is anywhere here."""
        waiting = {rid for rid in rids if rid in self.where}
        if not waiting:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((waiting, future))
        try:
            await future
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]

    def _tell_waiters(self, ended: str) -> None:
        for rids, future in self._waiters:
            rids.discard(ended)
            if not rids and not future.done():
                future.set_result(None)


def _meant(holder: Engine, data: bytes) -> list[str]:
    """The requests of a holder that an abort means; stock aborts by prefix."""
    prefix, abort_all = wire.abort_head(data)
    return [rid for rid in holder.in_flight if abort_all or rid.startswith(prefix)]
