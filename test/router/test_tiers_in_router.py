"""Requests with tiers in the router: who goes where, who waits, who is refused, and what is told in the end."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields
from router_fakes import generate
from sglang.srt.managers.io_struct import AbortReq, TokenizedEmbeddingReqInput, msgpack_decode
from tiered_world import CONFIG, Tiered

from sglang_adapt.core.layout import Role, parse_layout
from sglang_adapt.core.messages import AdmitRequest
from sglang_adapt.core.slo import SloConfig, Terms, Tier, request_terms
from sglang_adapt.policy.admission import Outcome
from sglang_adapt.policy.demand import Arrivals, Unfinished
from sglang_adapt.policy.limits import OPEN, Limits
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.tickets import TICKET_MS
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.upstream import wire


def test_feasible_requests_go_to_the_least_load() -> None:
    world = Tiered()
    for number in range(4):
        assert world.arrive(f"r{number}", "strict", tokens=20)
    assert world.placed() == {"tp1@0": ["r0", "r2"], "tp1@1": ["r1", "r3"]}
    world.check()


def test_infeasible_requests_wait_until_there_is_room_and_feasible_ones_pass_them() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    world.arrive("late", "strict", tokens=45)
    world.arrive("short", "strict", tokens=2)
    assert world.placed() == {"tp2@0-1": ["long", "short"]}
    assert world.router.in_flight == 3
    world.now += 82
    world.tokens("tp2@0-1", "long", [7], 1)
    world.tokens("tp2@0-1", "short", [7], 1)
    world.now += 5000
    world.router.let_go()
    assert world.placed() == {"tp2@0-1": ["long", "short", "late"]}
    world.check()
    world.finish("tp2@0-1", "long", "short", "late")
    assert {report.rid: report.outcome for report in world.reports} == {
        "long": "feasible",
        "short": "feasible",
        "late": "best_effort",
    }
    world.check()


def test_a_tier_that_would_rather_not_wait_is_refused_before_it_is_tokenized() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    _, admitted, retry_after_s = world.ask("picky", 60)
    assert (admitted, retry_after_s) == (False, 1)
    world.finish("tp2@0-1", "long")
    world.now += 5000
    assert world.ask("picky", 60)[1]


def test_a_refusal_tells_whether_the_shortest_prompt_would_be_refused_too() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)

    def refused_from(tokens: int) -> int:
        asked = AdmitRequest(7, request_terms(CONFIG, "picky"), tokens, None, world.now)
        answer = world.router.ask(asked)
        assert not answer.admitted
        return answer.holds_from

    assert refused_from(60) == 60
    while world.ask("picky", 1)[1]:
        # What is left is taken.
        pass
    assert refused_from(60) == 1


def test_the_planner_is_told_what_is_refused() -> None:
    world = Tiered("tp2@0-1")
    traffic = world.router._traffic = Traffic(world.admission.tier_of, lambda: world.now / 1000)
    assert world.arrive("a", "picky", tokens=80)
    for number in range(3):
        assert not world.arrive(f"r{number}", "picky", tokens=85)
    world.now += 1000
    traffic.close()
    assert traffic.windows[0].arrivals == {
        "picky": Arrivals(requests=4, prompt_tokens=80 + 3 * 85, prompt_squares=80**2 + 3 * 85**2)
    }
    # Of what was refused nothing is unfinished.
    assert traffic.unfinished([("a", True), ("r0", True)]) == {"picky": Unfinished(1, 1)}


def test_a_place_is_kept_for_an_admitted_request_for_a_time() -> None:
    world = Tiered("tp2@0-1")
    assert world.ask("picky", 50)[1]
    assert not world.ask("picky", 50)[1]
    world.now += TICKET_MS + 1
    assert world.ask("picky", 50)[1]


def test_a_place_that_is_given_back_is_free() -> None:
    world = Tiered("tp2@0-1")
    ticket, admitted, _ = world.ask("picky", 50)
    assert admitted and not world.ask("picky", 50)[1]
    world.admission.give_back(ticket.id)
    assert world.ask("picky", 50)[1]


def test_terms_are_known_however_late_a_request_comes() -> None:
    """Stock may send the requests of one call one after the other."""
    world = Tiered("tp2@0-1")
    ticket, _, _ = world.ask("picky")
    for rid in ("first", "second"):
        world.router.on_front_message(wire.encode_ticket(rid, ticket))
        world.request(rid)
        world.now += 2 * TICKET_MS
        world.finish("tp2@0-1", rid)
    assert [report.terms.tier for report in world.reports] == ["picky", "picky"]
    assert world.admission._named == {}


def test_a_request_that_lost_its_engine_to_a_switch_keeps_its_terms() -> None:
    """The engine dies under the hands of the router while a switch holds the others."""
    world = Tiered("tp2@0-1")
    world.router.pause([])
    world.connected["tp2@0-1"] = False
    world.router._out = replace(world.router._out, lost=lambda engine: world.router.pause([engine.name]))
    world.arrive("r", "picky")
    assert world.router.in_flight == 1 and world.seen("tp2@0-1") == []
    world.router.activate(parse_layout("tp1@0,tp1@1", (1, 2), 2))
    world.finish("tp1@0", "r")
    assert [report.terms.tier for report in world.reports] == ["picky"]
    assert world.admission._waiting.total() == 0
    world.check()


def test_work_that_gives_no_tokens_is_not_admitted_by_tiers() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    embed = {field.name: None for field in fields(TokenizedEmbeddingReqInput) if field.required}
    world.send(TokenizedEmbeddingReqInput(**embed | {"rid": "e", "input_ids": array("q", range(90))}))
    assert [wire.request_head(data)[0] for data in world.received["tp2@0-1"]] == ["long", "e"]
    assert "e" not in world.admission._records


def test_a_request_for_no_token_waits_for_its_answer() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("r", "strict")
    world.now += 9
    world.finish("tp2@0-1", "r")
    assert (world.reports[0].ttft_ms, world.reports[0].met) == (9.0, (True, True))


def test_a_target_of_one_request_holds_up_nobody_else() -> None:
    """Room is left for tiers that are to be expected, not for whatever target a client has named."""
    world = Tiered("tp2@0-1")
    terms = request_terms(CONFIG, "strict", tpot_header="2.1")
    world.router.on_front_message(wire.encode_ticket("odd", AdmitRequest(99, terms, 1, 4, world.now)))
    world.request("odd", 1)
    world.finish("tp2@0-1", "odd")
    world.arrive("s", "strict", tokens=1)
    world.arrive("n", "night", tokens=1)
    assert world.seen("tp2@0-1") == ["odd", "s", "n"]


def test_nothing_is_remembered_of_what_a_drain_refuses() -> None:
    world = Tiered("tp2@0-1")
    ticket, _, _ = world.ask("strict")
    world.router.closed = True
    world.router.on_front_message(wire.encode_ticket("r", ticket))
    world.request("r")
    assert [message.rid for message in world.tokenizer] == ["r"]
    assert (world.admission._named, world.admission._records, dict(world.admission._tickets.open)) == ({}, {}, {})


@pytest.mark.parametrize("serves", [True, False])
def test_a_queue_is_bounded(serves: bool) -> None:
    world = Tiered()
    if not serves:
        world.router.pause(["tp1@0", "tp1@1"])
    assert [world.ask("picky", 1)[1] for _ in range(6)] == [True] * 5 + [False]


def test_background_work_fills_what_is_left() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("s", "strict", tokens=2)
    for number in range(12):
        world.arrive(f"n{number}", "night", tokens=2)
    sent = world.seen("tp2@0-1")
    # With 7 requests a step takes 7 ms, three quarters of the target are 7.5.
    assert 3 <= len(sent) <= 7 and sent[0] == "s"
    assert world.admission.held == 13 - len(sent)
    world.check()
    world.now += 20_000
    world.finish("tp2@0-1", *sent)
    # Nothing with a target of late: background work has the engine to itself.
    assert world.admission.held == 0
    world.check()


def test_nothing_waits_for_ever() -> None:
    """Feasible requests keep the engine full; old work gets in one by one all the same."""
    world = Tiered("tp2@0-1")
    running = [f"s{number}" for number in range(7)]
    for rid in running:
        assert world.arrive(rid, "strict", tokens=1)
    world.arrive("n0", "night", tokens=50)
    world.arrive("n1", "night", tokens=50)
    for rid in running:
        world.tokens("tp2@0-1", rid, [7], 1)
    for _ in range(29):
        world.now += 1000
        world.arrive(f"more{world.now}", "strict", tokens=1)
        world.router.let_go()
    assert not {"n0", "n1"} & set(world.seen("tp2@0-1"))
    world.now += 1500
    world.router.let_go()
    assert "n0" in world.seen("tp2@0-1") and "n1" not in world.seen("tp2@0-1")
    world.finish("tp2@0-1", "n0")
    assert "n1" in world.seen("tp2@0-1")
    world.check()


def test_aborts_and_death_reach_what_waits() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    world.arrive("late1", "strict", tokens=60)
    world.arrive("late2", "strict", tokens=60)
    world.send(AbortReq(rid="late1"))
    assert [message.rid for message in world.tokenizer] == ["late1"]
    world.router.fail_all("the end")
    assert {message.rid for message in world.tokenizer} == {"late1", "long", "late2"}
    assert {report.ended for report in world.reports} == {"stopped"}
    assert world.router.in_flight == 0
    world.check()


def test_an_engine_is_told_the_class_of_each_request() -> None:
    """Promised, best effort, background; background work that has grown old is as promised."""
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    world.arrive("late", "strict", tokens=45)
    world.arrive("night", "night", tokens=2)
    world.arrive("old", "night", tokens=2)
    world.now += 5000
    world.tokens("tp2@0-1", "long", [7], 1)
    world.finish("tp2@0-1", "long")
    world.tokens("tp2@0-1", "late", [7], 1)
    world.finish("tp2@0-1", "late")
    sent = {message.rid: message for message in map(msgpack_decode, world.received["tp2@0-1"])}
    assert {rid: message.priority for rid, message in sent.items()} == {"long": 2, "late": 1, "night": 0, "old": 0}
    assert sent["late"].input_ids == generate("late", 45).input_ids
    world.arrive("full", "strict", tokens=80)
    for number in range(16):
        world.arrive(f"n{number}", "night", tokens=40)
    world.now += 31_000
    world.router.let_go()
    aged = {rid: record for rid, record in world.admission._records.items() if record.aged}
    assert len(aged) == 1
    sent = {message.rid: message.priority for message in map(msgpack_decode, world.received["tp2@0-1"])}
    assert [sent[rid] for rid in aged] == [2]


def test_limits_follow_what_was_promised() -> None:
    world = Tiered("tp2@0-1")
    engine = world.engine("tp2@0-1")
    world.arrive("n", "night", tokens=2)
    assert world.admission.limits(engine) == OPEN
    world.arrive("s", "strict", tokens=2)
    assert world.admission.limits(engine) == Limits(None, 8)
    world.admission._loads.sent("tp2@0-1", 1600.0)  # Prompts take most of its time.
    # Of 10 ms 9 may be used; a step takes 2, so 24 tokens of the ladder (1 ms each) fit beside four, or 8 requests.
    assert world.admission.limits(engine) == Limits(24, 8)
    world.finish("tp2@0-1", "s")
    assert world.admission.limits(engine) == OPEN


def test_limits_that_a_long_prompt_needs_are_there_before_it() -> None:
    """Beside a stream whose target is kept only if the prompt is cut."""
    world = Tiered("tp2@0-1")
    engine = world.engine("tp2@0-1")
    seen: list[tuple[str, Limits, list[str]]] = []
    world.on_placing = lambda rid, engine: seen.append(
        (rid, world.admission.limits(engine, rid), world.seen(engine.name))
    )
    world.arrive("a", "strict", tokens=2)
    world.tokens("tp2@0-1", "a", [7], 1)
    assert world.admission.limits(engine) == Limits(None, 8)
    world.arrive("n", "night", tokens=1900)
    world.now += 31_000  # It has waited its time.
    world.router.let_go()
    rid, limits, before = seen[-1]
    assert rid == "n" and before == ["a"] and world.seen("tp2@0-1") == ["a", "n"]
    assert limits == world.admission.limits(engine) == Limits(24, 8)


def test_a_switch_of_layout_keeps_what_waits() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("long", "strict", tokens=80)
    world.arrive("late", "strict", tokens=45)
    world.router.pause(["tp2@0-1"])
    world.arrive("new", "strict", tokens=1)
    world.router.activate(parse_layout("tp1@0,tp1@1", (1, 2), 2))
    assert {rid for name in ("tp1@0", "tp1@1") for rid in world.seen(name)} == {"late", "new"}
    world.check()


def test_report_has_times_and_forecasts() -> None:
    world = Tiered("tp2@0-1")
    world.arrive("r", "strict", tokens=20)
    world.now += 30
    world.tokens("tp2@0-1", "r", [7], 1)
    world.now += 40
    world.tokens("tp2@0-1", "r", [7] * 10, 11)
    world.finish("tp2@0-1", "r")
    (report,) = world.reports
    assert (report.ttft_ms, report.tpot_ms, report.queue_ms) == (30.0, 4.0, 0.0)
    assert report.forecast_ttft_ms == pytest.approx(20.0) and report.met == (True, True)
    assert (report.terms, report.output_tokens, report.ended) == (Terms("strict", 100.0, 10.0), 11, "finished")


@pytest.mark.parametrize("reason", [{"type": "abort", "message": "KV cache is full"}, {"type": "abort"}])
def test_a_request_that_is_given_up_while_it_runs_has_met_nothing(reason: dict[str, str]) -> None:
    world = Tiered("tp2@0-1")
    world.arrive("r", "strict", tokens=20)
    world.tokens("tp2@0-1", "r", [7], 1)
    world.output("tp2@0-1", ["r"], [reason])
    (report,) = world.reports
    assert report.ended == "stopped" and report.met == (False, False)
    world.check()


def test_what_can_still_be_in_time_goes_before_what_is_late() -> None:
    world = Tiered("tp2@0-1")
    for rid, tokens in (("long", 80), ("late", 45), ("soon", 30)):
        world.arrive(rid, "strict", tokens=tokens)
        world.now += 3
    assert world.placed() == {"tp2@0-1": ["long"]} and world.admission.held == 2
    # 45 ms more would be too much for `late` now; `soon` would take 30 and has 41 left.
    world.now = 1065.0
    world.finish("tp2@0-1", "long")
    assert world.placed() == {"tp2@0-1": ["long", "soon"]}
    assert world.admission.priority("soon") == 2
    world.now += 5000
    world.finish("tp2@0-1", "soon")
    assert world.placed() == {"tp2@0-1": ["long", "soon", "late"]}
    world.finish("tp2@0-1", "late")
    outcomes = {report.rid: report.outcome for report in world.reports}
    assert outcomes == {"long": "feasible", "soon": "feasible", "late": "best_effort"}


@pytest.mark.parametrize(("late", "goes"), [(1, True), (3, True), (4, False)])
def test_late_work_leaves_room_only_where_much_of_it_waits(late: int, goes: bool) -> None:
    """A few that have missed their target are no overload, and are not to wait until the engine has nothing to do."""
    world = Tiered("tp2@0-1")
    running = ["r0", "r1", "r2", "long"]
    for rid in running:
        world.arrive(rid, "strict", tokens=70 if rid == "long" else 3)
    waiting = [f"late{number}" for number in range(late)]
    for rid in waiting:
        world.arrive(rid, "strict", tokens=45)
    world.arrive("night", "night", tokens=1)
    world.now += 81
    for rid in running:
        world.tokens("tp2@0-1", rid, [7], 1)
    world.router.let_go()
    # Five requests take 5 ms a step: less than three quarters of the target, more than a quarter of what it leaves.
    assert [rid for rid in world.placed()["tp2@0-1"] if rid in waiting] == waiting[: 1 if goes else 0]
    # Once there is little to do the others go as well.
    world.finish("tp2@0-1", *running)
    assert waiting[0] in world.placed()["tp2@0-1"]
    world.check()


def test_what_is_seen_corrects_what_is_predicted() -> None:
    world = Tiered("tp2@0-1")
    for number in range(60):
        world.arrive(f"r{number}", "strict", tokens=20)
        world.now += 40
        world.tokens("tp2@0-1", f"r{number}", [7], 1)
        world.now += 40
        world.tokens("tp2@0-1", f"r{number}", [7] * 10, 11)
        world.finish("tp2@0-1", f"r{number}")
        world.now += 10_000
    assert world.admission.corrections[2].prefill == pytest.approx(2.0, rel=0.1)
    assert world.admission.corrections[2].decode == pytest.approx(2.0, rel=0.25)
    assert world.admission.corrections[1].prefill == 1.0


def test_a_slow_spell_is_forgotten() -> None:
    """After it nothing is feasible, but what runs without a promise shows that the engine is fast again."""
    world = Tiered("tp2@0-1")

    def run(rid: str, ttft_ms: float, tpot_ms: float) -> str:
        world.arrive(rid, "strict", tokens=25)
        world.router.let_go()
        world.now += ttft_ms
        world.tokens("tp2@0-1", rid, [7], 1)
        world.now += 10 * tpot_ms
        world.tokens("tp2@0-1", rid, [7] * 10, 11)
        world.finish("tp2@0-1", rid)
        world.now += 10_000
        return world.reports[-1].outcome

    assert [run(f"slow{n}", 4000, 300) for n in range(40)][-1] == "best_effort"
    assert [run(f"fast{n}", 25, 2) for n in range(60)][-1] == "feasible"


def _read_by_turns(world: Tiered, rids: Iterator[str], requests: int, stretch: float) -> None:
    """Requests one after the other, each with its first token before the one before has ended: prompts keep coming, so
    that no prompt is read alone and no steps are without one. All takes `stretch` times what the profile says."""
    engine, last = "tp2@0-1", ""
    for rid in itertools.islice(rids, requests):
        world.arrive(rid, "night", tokens=20)
        world.router.let_go()
        world.now += 20 * stretch
        world.tokens(engine, rid, [7], 1)
        if last:
            # It has waited for the prompt of the other one.
            world.now += 2 * stretch
            world.tokens(engine, last, [7] * 40, 41)
            world.finish(engine, last)
        world.now += 40 * 2 * stretch
        last = rid
    world.finish(engine, last)


def test_a_slow_spell_is_forgotten_while_prompts_keep_coming() -> None:
    world, rids = Tiered("tp2@0-1"), (f"r{number}" for number in itertools.count())
    _read_by_turns(world, rids, 60, 2.0)
    slow = world.admission.corrections[2]
    assert slow.prefill > 1.5
    assert slow.decode > 1.5
    _read_by_turns(world, rids, 60, 0.5)
    quick = world.admission.corrections[2]
    assert quick.prefill < 1.2
    assert quick.decode < 1.2


def test_nothing_of_a_slow_spell_stays() -> None:
    """That an engine takes a tenth less than is believed is not proof that it was measured too slow, but it is enough
    to take back what was learned."""
    world, rids = Tiered("tp2@0-1"), (f"r{number}" for number in itertools.count())
    _read_by_turns(world, rids, 60, 2.0)
    _read_by_turns(world, rids, 200, 0.95)
    assert world.admission.corrections[2].decode < 1.04


@pytest.mark.parametrize(("tier", "requests"), [("night", 1), ("strict", 6)])
def test_few_requests_that_are_quick_do_not_make_many_so(tier: str, requests: int) -> None:
    """Steps that are near no target say nothing of those that are, however quick they are."""
    world = Tiered("tp2@0-1")
    for number in range(60):
        rids = [f"r{number}-{of}" for of in range(requests)]
        for rid in rids:
            world.arrive(rid, tier, tokens=1)
        world.router.let_go()
        for rid in rids:
            world.tokens("tp2@0-1", rid, [7], 1)
        world.now += 10 * requests / 2
        for rid in rids:
            world.tokens("tp2@0-1", rid, [7] * 10, 11)
        for rid in rids:
            world.finish("tp2@0-1", rid)
        world.now += 10_000
    decode = world.admission.corrections[2].decode
    assert decode == 1.0 if tier == "night" else decode < 0.9


def test_promises_are_made_on_engines_of_the_tier_and_other_work_goes_anywhere() -> None:
    world = Tiered()
    world.admission.assign({"tp1@0": frozenset({"picky"})})
    for number in range(3):
        world.arrive(f"s{number}", "strict", tokens=20)
    world.arrive("p", "picky", tokens=2)
    world.arrive("n", "night", tokens=2)
    assert world.placed() == {"tp1@1": ["s0", "s1", "s2"], "tp1@0": ["p", "n"]}
    world.admission.assign({"tp1@0": frozenset(), "tp1@1": frozenset({"strict"})})
    assert not world.ask("picky")[1], "no engine has this tier now"
    assert world.arrive("late", "picky") is False
    world.admission.assign({})
    assert world.ask("picky")[1]
    world.check()
    with pytest.raises(ValueError, match=r"no engine tp9@0 to assign tiers to; there are tp1@0"):
        world.admission.assign({"tp9@0": frozenset()})


def test_an_engine_leaves_no_room_for_tiers_that_it_does_not_take() -> None:
    """Beside a tier with 10 ms a looser one may bring its engine to 7.5 ms; on an engine of its own to its own 9."""
    loose = Tier("loose", 10_000.0, 20.0)

    def taken(tiers_of: dict[str, frozenset[str]]) -> int:
        world = Tiered("tp2@0-1")
        world.admission.reload(SloConfig((*CONFIG.tiers, loose), "loose"))
        world.arrive("s", "strict", tokens=1)
        world.finish("tp2@0-1", "s")
        world.admission.assign(tiers_of)
        for number in range(20):
            world.request(f"l{number}", tokens=1)
            if f"l{number}" in world.engine("tp2@0-1").in_flight:
                world.tokens("tp2@0-1", f"l{number}", [7], 1)
        outcomes = [record.decision.outcome for record in world.admission._records.values()]
        return outcomes.count(Outcome.FEASIBLE)

    assert taken({}) < taken({"tp2@0-1": frozenset({"loose"})})


def test_other_tiers_from_now_on() -> None:
    world = Tiered()
    world.arrive("old", "picky")
    world.admission.reload(SloConfig((Tier("only", 50.0, 5.0),), "only"))
    world.request("new")
    world.finish("tp1@0", "old")
    world.finish("tp1@1", "new")
    assert [report.terms.tier for report in world.reports] == ["picky", "only"]


@given(st.lists(st.tuples(st.sampled_from(["strict", "picky", "night"]), st.integers(1, 120), st.integers(0, 80))))
@settings(deadline=None, max_examples=40)
def test_every_request_ends_once_whatever_comes(arrivals: list[tuple[str, int, int]]) -> None:
    world = Tiered()
    accepted = []
    for number, (tier, tokens, pause) in enumerate(arrivals):
        if world.arrive(f"r{number}", tier, tokens):
            accepted.append(f"r{number}")
        world.now += pause
        for name in ("tp1@0", "tp1@1"):
            there = list(world.engine(name).in_flight)
            if there and number % 3 == 0:
                world.finish(name, there[0])
        world.check()
    for _ in range(len(accepted) + 1):
        for name in ("tp1@0", "tp1@1"):
            world.finish(name, *world.engine(name).in_flight)
        world.now += 10_000
        world.router.let_go()
    assert sorted(report.rid for report in world.reports) == sorted(accepted)
    assert world.router.in_flight == 0


def test_what_is_promised_goes_to_an_engine_full_of_background_work() -> None:
    world = Tiered("tp2@0-1", slots=2)
    for rid in ("n0", "n1", "n2"):
        world.arrive(rid, "night", tokens=2)
        if rid in world.engine("tp2@0-1").in_flight:
            world.tokens("tp2@0-1", rid, [7], 1)
    assert world.seen("tp2@0-1") == ["n0", "n1"]
    world.arrive("s", "strict", tokens=2)
    assert world.seen("tp2@0-1") == ["n0", "n1", "s"]
    world.check()


def test_a_request_that_has_been_read_goes_on_where_targets_hold() -> None:
    world = Tiered()
    engines = [world.engine("tp1@0"), world.engine("tp1@1")]
    for number in range(16):
        world.arrive(f"s{number}", "strict", tokens=1)
        name = "tp1@0" if f"s{number}" in world.engine("tp1@0").in_flight else "tp1@1"
        world.tokens(name, f"s{number}", [7], 1)
    # Eight on each: a step takes 8 ms, and 9 with one more, which is the target of 10 ms less a margin.
    mine = next(iter(engines[1].in_flight))
    assert world.admission.decode_within(mine, engines) == {"tp1@0", "tp1@1"}
    # One more on the other engine, and there is no room for it beside.
    world.router.detach(engines[1], [mine])
    world.router.attach(engines[0], [mine])
    other = next(iter(engines[1].in_flight))
    assert world.admission.decode_within(other, engines) == {"tp1@1"}
    world.admission.assign({"tp1@1": frozenset({"picky"})})
    assert world.admission.decode_within(other, engines) == set()
    assert world.admission.decode_within("unknown", engines) == {"tp1@0", "tp1@1"}
    world.check()


def test_room_for_the_next_prompt_of_a_tier_ends_when_none_has_come_for_ten_seconds() -> None:
    world = Tiered("tp2@0-1")
    assert world.arrive("burst", "strict", tokens=20)
    world.finish("tp2@0-1", "burst")
    for number in range(4):
        # Each alone is more than half of the strict TTFT.
        world.arrive(f"n{number}", "night", tokens=60)
    world.router.let_go()
    assert world.placed() == {"tp2@0-1": ["burst", "n0"]}
    world.now += 9_000
    world.router.let_go()
    assert world.placed() == {"tp2@0-1": ["burst", "n0"]}
    world.now += 1_000
    world.router.let_go()
    assert world.placed() == {"tp2@0-1": ["burst", "n0", "n1", "n2", "n3"]}
    world.check()
    # The next one has room left for it again.
    world.arrive("strict again", "strict", tokens=1)
    for number in range(4, 6):
        world.arrive(f"n{number}", "night", tokens=60)
    assert "n4" not in world.seen("tp2@0-1")
    world.check()


def test_a_request_is_feasible_if_it_is_on_the_engine_that_reads_and_on_one_that_decodes() -> None:
    world = Tiered("tp1@0:prefill,tp1@1:decode", slots=99)
    # Nine that are read there are nine to be decoded, which takes 9 ms of 9.5; read, they take 2 ms each.
    assert [world.arrive(f"r{number}", "strict", tokens=2) for number in range(9)] == [True] * 9
    assert len(world.placed()["tp1@0"]) == 9 and "tp1@1" not in world.placed()
    assert not world.ask("picky", tokens=2)[1]
    world.engine("tp1@1").state = EngineState.DEAD
    assert world.admission.roles() == {"tp1@0": Role.PREFILL}
