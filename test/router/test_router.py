"""What the router does with each message, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from router_fakes import World, generate
from sglang.srt.managers import io_struct

from sglang_adapt.router.engine import EngineState
from sglang_adapt.upstream import wire


def test_nothing_is_dispatched_before_an_engine_is_warm() -> None:
    world = World()
    world.request("a")
    assert world.tokenizer[0].finished_reason["status_code"] == 503
    assert "no engine of layout tp1@0,tp1@1 is up" in world.tokenizer[0].finished_reason["message"]
    assert world.received == {"tp1@0": [], "tp1@1": [], "tp2@0-1": []}


def test_warm_up_outputs_are_swallowed() -> None:
    world = World().warm()
    assert world.outputs == []
    assert sorted(world.ready) == ["tp1@0", "tp1@1", "tp2@0-1"]


def test_requests_go_to_active_engines_by_load() -> None:
    world = World().warm()
    for rid in "abcd":
        world.request(rid)
    assert world.seen("tp1@0") == ["a", "c"]
    assert world.seen("tp1@1") == ["b", "d"]
    assert world.seen("tp2@0-1") == []
    world.finish("tp1@1", "b", "d")
    world.request("e")
    world.request("f")
    assert world.seen("tp1@1") == ["b", "d", "e", "f"]
    world.check()


def test_bytes_are_forwarded_untouched() -> None:
    world = World().warm()
    data = io_struct.msgpack_encode(generate("a"))
    world.router.on_front_message(data)
    assert world.received["tp1@0"] == [data]


def test_a_request_is_in_flight_until_its_last_output() -> None:
    world = World().warm()
    world.request("a")
    world.output("tp1@0", ["a"], [None])
    assert world.router.in_flight == 1
    world.finish("tp1@0", "a")
    assert world.router.in_flight == 0
    assert [output.rids for output in world.outputs] == [["a"], ["a"]]


def test_batches_are_spread() -> None:
    world = World().warm()
    world.send(io_struct.BatchTokenizedGenerateReqInput(batch=[generate(rid) for rid in "abc"]))
    assert (world.seen("tp1@0"), world.seen("tp1@1")) == (["a", "c"], ["b"])


def test_an_abort_goes_where_the_request_is() -> None:
    world = World().warm()
    world.request("a")
    world.request("b")
    world.send(io_struct.AbortReq(rid="b"))
    assert world.seen("tp1@0") == ["a"]
    assert world.seen("tp1@1") == ["b", "b"]
    # Stock aborts by prefix and answers a waiting request with an abort of its own.
    world.send(io_struct.AbortReq(rid="unknown"))
    assert world.seen("tp1@0")[-1] == "unknown"
    world.reply("tp1@1", io_struct.AbortReq(rid="b"))
    assert world.router.in_flight == 1
    assert world.tokenizer[-1].rid == "b"
    world.send(io_struct.AbortReq(abort_all=True))
    assert world.seen("tp1@0")[-1] == ""
    world.check()


def test_a_dead_engine_strands_its_requests_and_no_others() -> None:
    world = World().warm()
    for rid in "abcd":
        world.request(rid)
    world.router.engine_lost(world.engine("tp1@0"), EngineState.DEAD, "engine tp1@0 is down: killed")
    assert sorted(world.router.stranded.in_flight) == ["a", "c"]
    assert world.tokenizer == []
    assert world.router.in_flight == 4
    assert world.router.send_again("a")
    assert world.seen("tp1@1")[-1] == "a"
    world.send(io_struct.AbortReq(rid="c"))
    assert [m.rid for m in world.tokenizer] == ["c"]
    world.check()
    world.request("e")
    assert world.seen("tp1@1")[-1] == "e"
    world.warm("tp1@0")
    world.request("f")
    assert world.seen("tp1@0")[-1] == "f"
    world.check()


def test_a_request_whose_engines_die_again_and_again_ends_with_503() -> None:
    world = World().warm()
    world.request("a")
    for name in ("tp1@0", "tp1@1", "tp1@0"):
        assert world.tokenizer == []
        world.router.engine_lost(world.engine(name), EngineState.DEAD, f"engine {name} is down: killed")
        if world.router.stranded.in_flight:
            assert world.router.send_again("a")
        world.warm(name)
    [error] = world.tokenizer
    assert error.finished_reason["status_code"] == 503
    assert "3 engines died while they ran this request" in error.finished_reason["message"]
    world.check()


def test_where_no_engine_can_come_back_stranded_requests_end_with_503() -> None:
    world = World().warm()
    world.request("a")
    world.router.engine_lost(world.engine("tp1@1"), EngineState.FAILED, "engine tp1@1 is down: killed")
    assert world.tokenizer == []
    world.router.engine_lost(world.engine("tp1@0"), EngineState.FAILED, "engine tp1@0 is down: killed")
    [error] = world.tokenizer
    assert "no engine is left to go on" in error.finished_reason["message"]
    world.check()


def test_late_outputs_of_a_request_that_was_given_up_change_nothing() -> None:
    world = World().warm()
    world.request("a")
    world.router.fail_all("shutting down")
    assert world.seen("tp1@0") == ["a", "a"]
    world.finish("tp1@0", "a")
    assert world.router.in_flight == 0
    world.check()


def test_an_engine_that_takes_no_messages_is_reported_and_skipped() -> None:
    world = World().warm()
    world.connected["tp1@0"] = False

    def lost(engine: object) -> None:
        world.router.engine_lost(world.engine("tp1@0"), EngineState.DEAD, "gone")

    object.__setattr__(world.router._out, "lost", lost)
    world.request("a")
    assert world.seen("tp1@1") == ["a"]
    assert world.tokenizer == []
    world.check()


def test_health_checks_are_not_tracked() -> None:
    world = World().warm()
    world.request(f"{wire.HEALTH_RID_PREFIX}_1")
    assert world.router.in_flight == 0
    world.reply("tp1@0", io_struct.HealthCheckOutput())
    assert isinstance(world.tokenizer[-1], io_struct.HealthCheckOutput)


def test_shutting_down_refuses_new_requests() -> None:
    world = World().warm()
    world.router.closed = True
    world.request("a")
    assert "shutting down" in world.tokenizer[0].finished_reason["message"]


def test_control_requests_go_to_all_engines_and_come_back_as_one() -> None:
    world = World().warm()
    world.send(io_struct.FlushCacheReqInput())
    assert {name: len(received) for name, received in world.received.items()} == {
        "tp1@0": 1,
        "tp1@1": 1,
        "tp2@0-1": 1,
    }
    world.reply("tp1@0", io_struct.FlushCacheReqOutput(success=True))
    world.reply("tp2@0-1", io_struct.FlushCacheReqOutput(success=True))
    assert world.tokenizer == []
    world.reply("tp1@1", io_struct.FlushCacheReqOutput(success=False, message="busy"))
    assert len(world.tokenizer) == 1
    assert not world.tokenizer[0].success
    assert world.tokenizer[0].message == "tp1@1: busy"


def test_a_dead_engine_is_not_waited_for() -> None:
    world = World().warm()
    world.send(io_struct.FlushCacheReqInput())
    world.reply("tp1@0", io_struct.FlushCacheReqOutput(success=True))
    world.reply("tp1@1", io_struct.FlushCacheReqOutput(success=True))
    world.router.engine_lost(world.engine("tp2@0-1"), EngineState.DEAD, "killed")
    assert [message.success for message in world.tokenizer] == [True]


def test_a_control_request_without_engines_is_asked_of_the_next_one() -> None:
    world = World()
    world.send(io_struct.GetInternalStateReq())
    assert world.tokenizer == []
    world.warm("tp1@1")
    assert len(world.received["tp1@1"]) == 1
    world.reply("tp1@1", io_struct.GetInternalStateReqOutput(internal_state={"x": 1}))
    assert world.tokenizer[0].internal_state["x"] == 1


def test_a_control_request_that_engines_die_of_is_not_asked_again() -> None:
    world = World().warm()
    world.send(io_struct.ExpertDistributionReq(action=io_struct.ExpertDistributionReqType.START_RECORD))
    for name in ("tp1@0", "tp1@1", "tp2@0-1"):
        assert world.tokenizer == []
        world.router.engine_lost(world.engine(name), EngineState.DEAD, f"engine {name} is down")
    [failure] = world.tokenizer
    assert failure.rid == f"{wire.CONTROL_FAILED_PREFIX}ExpertDistributionReqOutput"
    assert failure.finished_reason["message"].startswith("engine tp1@0 is down | engine tp1@1 is down")
    assert failure.finished_reason["status_code"] == 503
    world.warm("tp1@1")
    assert len(world.received["tp1@1"]) == 1


def test_an_engine_that_fails_a_control_request_fails_the_whole() -> None:
    world = World().warm()
    world.send(io_struct.FlushCacheReqInput())
    world.reply("tp1@0", io_struct.FlushCacheReqOutput(success=True))
    world.reply("tp1@1", wire.control_failure(b"FlushCacheReqOutput", "no such file", 500))
    world.reply("tp2@0-1", io_struct.FlushCacheReqOutput(success=True))
    [failure] = world.tokenizer
    assert failure.finished_reason == {"type": "abort", "message": "tp1@1: no such file", "status_code": 500}


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    world = World().warm()
    world.reply("tp1@0", io_struct.FlushCacheReqOutput(success=True))
    assert world.tokenizer == []


def test_garbage_raises_and_leaves_the_router_as_it_was() -> None:
    world = World().warm()
    with pytest.raises(wire.WireError):
        world.router.on_front_message(b"\xff\x00")
    world.request("a")
    assert world.seen("tp1@0") == ["a"]


class AnyOrder(RuleBasedStateMachine):
    """Requests, outputs, aborts, deaths and returns in any order: every accepted request ends exactly once."""

    @initialize()
    def start(self) -> None:
        self.world = World().warm()
        self.sent: set[str] = set()
        self.number = 0

    @rule(tokens=st.integers(1, 50))
    def request(self, tokens: int) -> None:
        self.number += 1
        rid = f"r{self.number}"
        self.sent.add(rid)
        self.world.request(rid, tokens)

    @rule(data=st.data(), name=st.sampled_from(["tp1@0", "tp1@1"]))
    def outputs(self, data: st.DataObject, name: str) -> None:
        rids = sorted(self.world.engine(name).in_flight)
        if rids:
            chosen = data.draw(st.lists(st.sampled_from(rids), min_size=1, unique=True))
            done = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
            self.world.output(name, chosen, [{"type": "stop"} if end else None for end in done])

    @rule(data=st.data(), name=st.sampled_from(["tp1@0", "tp1@1"]))
    def abort(self, data: st.DataObject, name: str) -> None:
        rids = sorted(self.world.engine(name).in_flight)
        if rids:
            rid = data.draw(st.sampled_from(rids))
            self.world.send(io_struct.AbortReq(rid=rid))
            self.world.reply(name, io_struct.AbortReq(rid=rid))

    @rule(name=st.sampled_from(["tp1@0", "tp1@1"]))
    def die_or_return(self, name: str) -> None:
        engine = self.world.engine(name)
        if engine.state is EngineState.READY:
            self.world.router.engine_lost(engine, EngineState.DEAD, "killed")
        else:
            self.world.warm(name)

    @rule()
    def repair(self) -> None:
        for rid in list(self.world.router.stranded.in_flight):
            self.world.router.send_again(rid)

    @invariant()
    def each_request_is_somewhere_once(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        ended = [m.rid for m in self.world.tokenizer]
        for output in self.world.outputs:
            ended += [r for r, reason in zip(output.rids, output.finished_reasons, strict=True) if reason]
        assert len(ended) == len(set(ended))
        holders = [*self.world.router.engines.values(), self.world.router.stranded]
        running = {rid for engine in holders for rid in engine.in_flight}
        assert running | set(ended) == self.sent
        assert not running & set(ended)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
