"""Single requests under way from one engine to another, from the call to the taker until the source has let go.

They are on the move for one call (`TakeOverCall`), and the taker's from its answer on. When it says that their KV has
arrived, the source lets go. The ledgers know what is read from before the call until then, or until all processes of
the taker are gone; so blocks of a source that dies meanwhile are given to nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from sglang_adapt.core.handoff import CarriedRequest, KvSource
from sglang_adapt.core.handover import Arrived, NotArrived, TakeOverCall
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.leases import CopyTicket
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.router.ahead import Ahead, Going
from sglang_adapt.router.asking import ask_handover
from sglang_adapt.router.calls import CallRefusedError, EngineCallError, EngineGoneError
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.readers import Readers
from sglang_adapt.router.router import Router
from sglang_adapt.router.tasks import Tasks
from sglang_adapt.router.told import Told

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request that has its first token, held by the engine that gave it.

    Attributes:
        hold: the number by which the engine holds it.
        deaths: how often the engine had died then.
        blocks: by rank of the source, in token order.
        since_s: when the router was told, by `time.monotonic`.
        settled_s: when its first token had been sent.
    """

    request: CarriedRequest
    hold: int
    source: EngineSpec
    deaths: int
    blocks: list[list[int]]
    since_s: float
    settled_s: float

    @property
    def rid(self) -> str:
        return self.request.rid


@dataclass(eq=False)
class Move:
    """Requests under way from one engine to another.

    Attributes:
        deaths: how often the taker had died when it began.
        due: of those, what has not arrived.
        arrived: set when all have, or the taker has died.
        ahead: what went ahead of each.
        ticket: of what is read.
        lost: what the taker has said of those whose KV has not come.
        answered_s: when the taker had answered, by `time.monotonic`.
    """

    source: EngineSpec
    taker: EngineSpec
    prompts: list[Prompt]
    deaths: int
    due: set[str]
    arrived: asyncio.Future[None]
    ahead: list[Going | None]
    ticket: CopyTicket
    lost: list[NotArrived] = field(default_factory=list)
    answered_s: float = 0.0

    @property
    def rids(self) -> list[str]:
        return [prompt.rid for prompt in self.prompts]


@dataclass(frozen=True)
class Ends:
    """Who is told how a move ends.

    Attributes:
        refused: called with an engine that has no room for now.
        back: called with requests that wait at their source again.
        over: called when a move is over, however it has ended.
        blocks_came_back: called when there are free blocks for the layout's engines.
    """

    refused: Callable[[EngineSpec], None]
    back: Callable[[Sequence[Prompt]], None]
    over: Callable[[], None]
    blocks_came_back: Callable[[], None]


class Moves:
    """See the module.

    Args:
        router: where requests are.
        pools: whose blocks are whose, and the way to the engines' ranks.
        up: which engines are.
        tasks: where moves are under way.
        ahead: what has gone ahead of requests.
        readers: the sources.
        told: what has become of requests.
        ends: who is told.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        up: Lives,
        tasks: Tasks,
        ahead: Ahead,
        readers: Readers,
        told: Told,
        ends: Ends,
    ) -> None:
        self._router = router
        self._pools = pools
        self._up = up
        self._tasks = tasks
        self._ahead = ahead
        self._readers = readers
        self._told = told
        self._ends = ends
        self._moves: list[Move] = []

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    def coming(self, taker: EngineSpec) -> list[int]:
        """Tokens of each request that an engine gets and has not answered for yet."""
        coming = [prompt for move in self._moves if move.taker == taker for prompt in move.prompts]
        return [prompt.request.length for prompt in coming if prompt.rid in self._router.moving.in_flight]

    def landed(self, taker: EngineSpec, arrived: Arrived) -> None:
        """An engine has all KV of requests that it has taken over."""
        for move in self._to(taker, arrived.rids):
            self._note(move, arrived)
            self._settled(move, arrived.rids)

    def lost(self, taker: EngineSpec, lost: NotArrived) -> None:
        """The KV of requests that an engine has taken over has not come: they are not there any more."""
        for move in self._to(taker, lost.rids):
            move.lost.append(lost)
            self._settled(move, lost.rids)

    def _to(self, taker: EngineSpec, rids: Iterable[str]) -> list[Move]:
        """Moves to an engine by which any of these requests is due."""
        return [move for move in self._moves if move.taker == taker and not move.due.isdisjoint(rids)]

    def _settled(self, move: Move, rids: Iterable[str]) -> None:
        """Nothing is copied any more for these."""
        move.due.difference_update(rids)
        if not move.due and not move.arrived.done():
            move.arrived.set_result(None)

    def engine_lost(self, spec: EngineSpec) -> None:
        """An engine has died: what was to arrive there does not."""
        for move in self._moves:
            if move.taker == spec and not move.arrived.done():
                move.arrived.set_exception(EngineGoneError(f"{spec} died before the KV had arrived"))

    def begin(self, source: EngineSpec, taker: EngineSpec, prompts: list[Prompt]) -> None:
        """Requests of one source are on the move from here on."""
        try:
            ticket = self._begin_copy(prompts)
        except LedgerError as error:
            # The source has named blocks that are not its own: nobody knows what it holds.
            self._pools.kill(source, str(error))
            return
        rids = [prompt.rid for prompt in prompts]
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ahead = [self._ahead.claim(source, prompt.deaths, prompt.rid, taker, prompt.blocks) for prompt in prompts]
        move = Move(source, taker, prompts, self._pools.deaths(taker), set(rids), arrived, ahead, ticket)
        self._moves.append(move)
        self._router.detach(self._router.engines[source.name], rids)
        self._tasks.start(self._carry_out(move))

    async def _carry_out(self, move: Move) -> None:
        """Bring requests from one engine to another."""
        try:
            await self._take_over(move)
        except Exception as error:
            # A fault in this program: nobody knows what the engines hold.
            logger.exception("handing requests over from %s to %s broke off", move.source, move.taker)
            self._recompute(move, str(error))
            for spec in (move.source, move.taker):
                if self._up.is_up(spec):
                    self._pools.kill(spec, "handing requests over broke off")
            await self._end_with_taker(move)
        finally:
            self._moves.remove(move)
        self._ends.over()

    async def _take_over(self, move: Move) -> None:
        sources = [KvSource(list(move.source.gpus), prompt.blocks) for prompt in move.prompts]
        numbers = [0 if going is None else going.number for going in move.ahead]
        call = TakeOverCall([prompt.request for prompt in move.prompts], sources, numbers)
        asked_s = monotonic()
        try:
            answers = await ask_handover(self._pools, move.taker, call)
        except CallRefusedError as error:
            logger.info("%s takes over nothing for now: %s", move.taker, error)
            self._refused(move, str(error))
            return
        except EngineCallError as error:
            self._recompute(move, str(error))
            await self._end_with_taker(move)
            await self._let_go(move)
            return
        move.answered_s = monotonic()
        for prompt in move.prompts:
            self._told.took(move.answered_s - prompt.since_s)
        self._told.steps.add_ranks(answer.steps_ms for answer in answers)
        for prompt in move.prompts:
            self._told.steps.add("place", 1e3 * (asked_s - prompt.since_s))
        self._told.add("handed_over", len(move.prompts))
        self._told.ahead_tokens += answers[0].ahead_tokens
        self._router.arrive(self._router.engines[move.taker.name], move.rids)
        try:
            await move.arrived
        except EngineGoneError:
            await self._end_with_taker(move)
        else:
            self._end_copy(move)
            for lost in move.lost:
                self._leave_taker(move, lost)
        await self._let_go(move)

    def _leave_taker(self, move: Move, lost: NotArrived) -> None:
        """Requests whose KV has not come at the engine that has them go on from their tokens, or end."""
        taker = self._router.engines[move.taker.name]
        there = [rid for rid in lost.rids if rid in taker.in_flight]
        self._told.add("recomputed", len(there))
        self._router.strand(taker, there, f"their KV has not come from {move.source}: {lost.why}")
        self._router.abort(rid for rid in lost.aborted if rid in there)

    def _note(self, move: Move, arrived: Arrived) -> None:
        """How long it took; a move whose answer was not read yet has come first."""
        steps = self._told.steps
        steps.add_ranks([arrived.steps_ms])
        steps.add("arrive", 1e3 * (monotonic() - move.answered_s) if move.answered_s else 0.0)
        for prompt in move.prompts:
            if arrived.ran_s and prompt.settled_s and prompt.rid in arrived.rids:
                steps.add("tell", 1e3 * (prompt.since_s - prompt.settled_s))
                steps.add("in all", 1e3 * (arrived.ran_s - prompt.settled_s))

    # How a move ends.

    def _refused(self, move: Move, why: str) -> None:
        """Nothing has changed but time: the requests wait at their source again, if it lives."""
        ahead, move.ahead = move.ahead, []
        self._end_copy(move)
        self._ends.refused(move.taker)
        for going in filter(None, ahead):
            self._ahead.drop(going)
        if not self._up.is_same(move.source, move.prompts[0].deaths):
            self._recompute(move, f"{move.source} died, and {why}")
            return
        self._router.arrive(self._router.engines[move.source.name], move.rids)
        self._ends.back(move.prompts)

    def _recompute(self, move: Move, why: str) -> None:
        """Requests go on elsewhere, from their tokens."""
        there = [rid for rid in move.rids if rid in self._router.moving.in_flight]
        self._told.add("recomputed", len(there))
        self._router.strand(self._router.moving, there, why)
        self._router.carry_out_aborts(there)

    async def _let_go(self, move: Move) -> None:
        """The source need not hold the requests any more."""
        await self._readers.let_go(move.source, [prompt.hold for prompt in move.prompts], move.prompts[0].deaths)

    # The copy.

    def _begin_copy(self, prompts: Sequence[Prompt]) -> CopyTicket:
        """Note what is read. What is written is the taker's, and nobody else's before all its processes are gone."""
        reads: dict[int, list[int]] = {}
        for prompt in prompts:
            for gpu, blocks in zip(prompt.source.gpus, prompt.blocks, strict=True):
                reads.setdefault(gpu, []).extend(blocks)
        return self._pools.begin_reading(reads)

    async def _end_with_taker(self, move: Move) -> None:
        """Nobody knows whether the taker still copies until all its processes are gone."""
        await self._pools.gone(move.taker, move.deaths)
        self._end_copy(move)

    def _end_copy(self, move: Move) -> None:
        """Nothing copies any more."""
        self._pools.end_copy(move.ticket)
        for going in filter(None, move.ahead):
            self._ahead.arrived(going)
        if self._pools.deaths(move.source) != move.prompts[0].deaths:
            # Blocks that were read until now have come back only now.
            self._ends.blocks_came_back()
