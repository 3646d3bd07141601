"""Calls to an engine's ranks: `await calls.call("tp1@0", "kv_grow", {...}, epoch)` and what can come of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import zmq

from sglang_adapt.core.messages import EngineCall, EngineNotice, EngineReply
from sglang_adapt.upstream import wire

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""How long an engine may take to answer: it finishes the batch in flight first, which a long prefill makes long."""
CALL_TIMEOUTS_S = {"reload_weights": 600.0}
"""The same of calls that take longer."""


class EngineCallError(RuntimeError):
    """A call did not do what it should; the text names the engine, the call and why."""


class CallRefusedError(EngineCallError):
    """All ranks refused, with nothing changed."""


class CallBrokenError(EngineCallError):
    """The ranks differ, or did not answer in time: the engine's state is not known, so it must be started anew."""


class EngineGoneError(EngineCallError):
    """The engine died before it answered, or does not run."""


class NotSentError(EngineGoneError):
    """The engine was not asked: it is down, being started, about to be found dead, or takes no messages now."""


class EngineCalls:
    """The calls under way, of all engines.

    Args:
        send: puts one stock message on an engine's input; raises zmq.Again when nobody is connected.
        is_up: has an engine answered its warm-up request, and not died since? Others are asked nothing; one that is
            being started would not answer.
        noticed: called with an engine's name and what it has said unasked.
    """

    def __init__(
        self,
        send: Callable[[str, bytes], None],
        is_up: Callable[[str], bool],
        noticed: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._is_up = is_up
        self._send = send
        self._noticed = noticed
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[str, EngineCall, asyncio.Future[EngineReply]]] = {}
        self._deaths: Counter[str] = Counter()

    async def call(
        self, engine: str, name: str, payload: dict[str, Any], epoch: int, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Ask all ranks of an engine for one thing and wait; returns what each rank answered.

        Where an answer has `steps_ms`, they begin with `wait`, until the rank began, and end with `return`, from when
        it was done until now.

        The reply comes after all output that the engine sent before it did what was asked. With overlap scheduling one
        batch may be in flight then, whose output follows; who needs its results settles it first.

        Args:
            engine: its name.
            name: what to do, one of `engine.control.HANDLERS`.
            payload: plain values and bytes, the same for all ranks.
            epoch: of the layout that the call belongs to.
            timeout_s: how long to wait, in seconds; None: as long as such a call may take.

        Raises:
            CallRefusedError, CallBrokenError, NotSentError, EngineGoneError: see there.
        """
        return await self.begin(engine, name, payload, epoch, timeout_s)

    def begin(
        self, engine: str, name: str, payload: dict[str, Any], epoch: int, timeout_s: float | None = None
    ) -> Awaitable[list[dict[str, Any]]]:
        """The same, sent before this returns, so that the engine has it before whatever is sent to it next.

        Returns what is to be awaited, once, for the answers; all errors come from there.
        """
        if not self._is_up(engine):
            return _failed(NotSentError(f"{engine}: {name} was not sent: the engine is down, or being started"))
        call, sent_s = EngineCall(next(self._ids), epoch, name, payload), monotonic()
        future: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        try:
            self._send(engine, wire.encode_call(call))
        except zmq.Again:
            return _failed(NotSentError(f"{engine}: {name} was not sent: the engine does not take messages"))
        self._open[call.id] = (engine, call, future)
        if timeout_s is None:
            timeout_s = CALL_TIMEOUTS_S.get(name, CALL_TIMEOUT_S)
        return self._answer(call, engine, future, (sent_s, self._deaths[engine]), timeout_s)

    async def _answer(
        self,
        call: EngineCall,
        engine: str,
        future: asyncio.Future[EngineReply],
        since: tuple[float, int],
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        name, (sent_s, deaths) = call.name, since
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise CallBrokenError(f"{engine}: {name} was not answered within {timeout_s:g} s") from None
        finally:
            del self._open[call.id]
        if self._deaths[engine] != deaths:
            # What it has taken up is lost, and who looks after that has looked already.
            raise EngineGoneError(f"{engine}: it died right after {name}")
        return _timed(_answers(engine, name, reply), reply, sent_s)

    def on_reply(self, engine: str, data: bytes) -> None:
        """What an engine says to the router has come. One that nobody waits for any more is dropped."""
        reply = wire.said_in(data)
        if isinstance(reply, EngineNotice):
            if self._noticed is not None:
                self._noticed(engine, reply.payload)
            else:
                logger.warning("%s has something to say, and nobody listens", engine)
            return
        engine_asked, call, future = self._open.get(reply.id, (None, None, None))
        if future is None or call is None or engine_asked != engine or call.epoch != reply.epoch or future.done():
            logger.warning("%s answered call %d of epoch %d, which nobody waits for", engine, reply.id, reply.epoch)
            return
        future.set_result(reply)

    def engine_lost(self, engine: str, why: str) -> None:
        """An engine died: its calls end, also those whose answer has come and was not read yet."""
        self._deaths[engine] += 1
        for asked, call, future in self._open.values():
            if asked == engine and not future.done():
                future.set_exception(EngineGoneError(f"{engine}: {call.name} was not answered: {why}"))


async def _failed(error: EngineCallError) -> list[dict[str, Any]]:
    raise error


def _timed(answers: list[dict[str, Any]], reply: EngineReply, sent_s: float) -> list[dict[str, Any]]:
    now_s = monotonic()
    for answer, rank in zip(answers, reply.ranks, strict=True):
        if "steps_ms" in answer:
            wait, back = 1e3 * (rank.began_s - sent_s), 1e3 * (now_s - rank.ended_s)
            answer["steps_ms"] = {"wait": round(wait, 3), **answer["steps_ms"], "return": round(back, 3)}
    return answers


def _answers(engine: str, name: str, reply: EngineReply) -> list[dict[str, Any]]:
    errors = {rank: answer.error for rank, answer in enumerate(reply.ranks) if answer.error is not None}
    if not errors:
        return [answer.answer or {} for answer in reply.ranks]
    text = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
    if len(errors) < len(reply.ranks):
        raise CallBrokenError(f"{engine}: only some ranks did {name}: {text}")
    raise CallRefusedError(f"{engine}: {name} was refused: {text}")
