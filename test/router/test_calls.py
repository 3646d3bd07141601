"""Calls to engines: what comes of an answer, a refusal, a disagreement, silence and a death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq
from router_fakes import World
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from sglang_adapt.core.handoff import CarriedRequest, RequestKind, to_plain
from sglang_adapt.core.handover import Prefilled
from sglang_adapt.core.messages import EngineCall, EngineNotice, EngineReply, RankAnswer
from sglang_adapt.engine.control import EngineControl
from sglang_adapt.kv.adaptor import LeaseError
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineCalls, EngineGoneError
from sglang_adapt.upstream import wire


class Engine:
    """An engine's input, read by hand."""

    def __init__(self) -> None:
        self.sent: list[EngineCall] = []
        self.connected = True
        self.up = True
        self.calls = EngineCalls(self.send, lambda name: self.up)

    def send(self, name: str, data: bytes) -> None:
        if not self.connected:
            raise zmq.Again
        call = wire.call_of(msgpack_decode(data))
        assert call is not None
        self.sent.append(call)

    def reply(self, *ranks: RankAnswer, name: str = "tp2@0-1", epoch: int | None = None) -> None:
        call = self.sent[-1]
        reply = EngineReply(call.id, call.epoch if epoch is None else epoch, list(ranks))
        self.calls.on_reply(name, msgpack_encode(wire.reply_message(reply)))


OK = RankAnswer(answer={"pages": [1, 2]})
NO = RankAnswer(error="CannotShrinkError: too many")


def asking(then: Callable[[Engine], Any], timeout_s: float = 20) -> list[dict[str, Any]]:
    """Call an engine; `then` runs once the call is sent."""

    async def main() -> list[dict[str, Any]]:
        engine = Engine()
        call: Awaitable[list[dict[str, Any]]] = engine.calls.call("tp2@0-1", "kv_give_back", {"count": 2}, 7, timeout_s)
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        assert engine.sent == [EngineCall(1, 7, "kv_give_back", {"count": 2})]
        then(engine)
        answers = await task
        assert not engine.calls._open
        return answers

    return asyncio.run(main())


def test_the_answers_of_all_ranks_come_back() -> None:
    assert asking(lambda engine: engine.reply(OK, RankAnswer())) == [{"pages": [1, 2]}, {}]


def test_steps_get_the_time_on_the_way() -> None:
    began = time.monotonic()
    rank = RankAnswer({"steps_ms": {"drain": 3.0}}, None, began + 1, began)
    steps = asking(lambda engine: engine.reply(rank))[0]["steps_ms"]
    assert list(steps) == ["wait", "drain", "return"]
    assert 0 < steps["wait"] <= 1000 and steps["return"] > 0


@pytest.mark.parametrize("answer", [OK, NO])
def test_an_answer_of_an_engine_that_has_died_before_it_is_read_does_not_count(answer: RankAnswer) -> None:
    def answer_and_die(engine: Engine) -> None:
        engine.reply(answer)
        engine.calls.engine_lost("tp2@0-1", "killed")

    with pytest.raises(EngineGoneError, match="it died right after kv_give_back"):
        asking(answer_and_die)


def test_a_refusal_of_all_ranks_leaves_everything_as_it_was() -> None:
    with pytest.raises(CallRefusedError, match="kv_give_back was refused: rank 0: CannotShrinkError: too many"):
        asking(lambda engine: engine.reply(NO, NO))


def test_ranks_that_differ_break_the_engine() -> None:
    with pytest.raises(CallBrokenError, match="only some ranks did kv_give_back: rank 1: CannotShrinkError"):
        asking(lambda engine: engine.reply(OK, NO))


def test_silence_breaks_the_engine() -> None:
    with pytest.raises(CallBrokenError, match=r"kv_give_back was not answered within 0.01 s"):
        asking(lambda engine: None, timeout_s=0.01)


def test_a_death_ends_the_call() -> None:
    with pytest.raises(EngineGoneError, match="not answered: rank 0 ended"):
        asking(lambda engine: engine.calls.engine_lost("tp2@0-1", "rank 0 ended"))


def test_replies_of_another_engine_or_epoch_do_not_count() -> None:
    def then(engine: Engine) -> None:
        engine.reply(NO, NO, name="tp1@0")
        engine.reply(NO, NO, epoch=6)
        engine.calls.engine_lost("tp1@0", "another engine's end")
        engine.reply(OK, OK)
        engine.reply(NO, NO)

    assert asking(then) == [{"pages": [1, 2]}, {"pages": [1, 2]}]


def test_an_engine_without_a_connection() -> None:
    async def main() -> None:
        engine = Engine()
        engine.connected = False
        with pytest.raises(EngineGoneError, match="kv_state was not sent"):
            await engine.calls.call("tp1@0", "kv_state", {}, 0)
        assert not engine.calls._open

    asyncio.run(main())


def test_an_engine_that_is_not_up_is_not_asked() -> None:
    async def main() -> None:
        engine = Engine()
        engine.up = False
        with pytest.raises(EngineGoneError, match="tp1@0: kv_state was not sent: the engine is down, or being started"):
            await engine.calls.call("tp1@0", "kv_state", {}, 0)
        assert (engine.sent, engine.calls._open) == ([], {})

    asyncio.run(main())


def test_replies_do_not_reach_the_front() -> None:
    world = World().warm()
    reply = wire.reply_message(EngineReply(3, 0, [OK]))
    world.reply("tp1@0", reply)
    assert world.tokenizer == []
    assert [(name, wire.said_in(data).id) for name, data in world.replied] == [("tp1@0", 3)]


# The ranks' side.


def refuse(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    raise LeaseError("page 0 cannot be leased")


def fail(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError


CONTROL = {"echo": lambda scheduler, rank, payload: {"rank": rank, **payload}, "refuse": refuse, "fail": fail}


def test_a_rank_does_what_it_is_called_for() -> None:
    control = EngineControl(CONTROL)
    echo = control(None, 1, EngineCall(1, 0, "echo", {"x": 5}))
    assert (echo.answer, echo.error) == ({"rank": 1, "x": 5}, None)
    assert 0 < echo.began_s <= echo.ended_s
    assert control(None, 0, EngineCall(2, 0, "refuse", {})) == RankAnswer(error="LeaseError: page 0 cannot be leased")
    unknown = control(None, 0, EngineCall(3, 0, "sing", {}))
    assert unknown == RankAnswer(error="nothing is called 'sing'; there is echo, refuse, fail")


def test_a_rank_refuses_a_call_of_an_earlier_epoch() -> None:
    control = EngineControl(CONTROL)
    assert control(None, 0, EngineCall(1, 4, "echo", {})).error is None
    assert control(None, 0, EngineCall(2, 4, "echo", {})).error is None
    stale = control(None, 0, EngineCall(3, 3, "echo", {}))
    assert stale.error == "echo of epoch 3 came after a call of epoch 4; it is refused"


def test_an_unexpected_error_ends_the_rank() -> None:
    with pytest.raises(ZeroDivisionError):
        EngineControl(CONTROL)(None, 0, EngineCall(1, 0, "fail", {}))


def test_what_an_engine_says_unasked_is_passed_on() -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    calls = EngineCalls(Engine().send, lambda name: True, lambda name, payload: heard.append((name, payload)))
    request = CarriedRequest("r", RequestKind.RUNNING, 5, 6, 9, None, b"state")
    told = Prefilled([request], [1], [[[3], [4]]])
    calls.on_reply("tp2@0-1", msgpack_encode(wire.notice_message(EngineNotice(to_plain(told)))))
    [(name, payload)] = heard
    assert name == "tp2@0-1"
    assert msgspec.convert(payload, Prefilled) == told


def test_a_call_that_is_begun_is_sent_before_what_is_sent_next() -> None:
    async def main() -> None:
        engine = Engine()
        answer = engine.calls.begin("tp2@0-1", "limits", {}, 7)
        assert engine.sent == [EngineCall(1, 7, "limits", {})]
        engine.reply(OK)
        assert await answer == [{"pages": [1, 2]}]
        engine.up = False
        with pytest.raises(EngineGoneError, match="is down"):
            await engine.calls.begin("tp2@0-1", "limits", {}, 7)
        assert len(engine.sent) == 1 and not engine.calls._open

    asyncio.run(main())
