"""Admission with mechanisms switched off for a measurement: who is refused, who waits, and what is limited then."""

from __future__ import annotations

from tiered_world import Tiered

from sglang_adapt.core.ablation import Ablation, Scheduler
from sglang_adapt.policy.limits import OPEN

ARRIVAL = Ablation(Scheduler.ARRIVAL)
BATCH_RULE = Ablation(Scheduler.BATCH_RULE)
BY_TIER = (("strict", ("tp1@0",)), ("picky", ("tp1@1",)), ("night", ("tp1@1",)))


def load_up(world: Tiered) -> None:
    """A long prompt on the only engine, behind which nothing short is in time."""
    world.arrive("long", "strict", tokens=80)
    world.arrive("late", "strict", tokens=45)
    world.arrive("refused", "picky", tokens=60)
    world.arrive("night", "night", tokens=30)


def test_by_arrival_all_go_at_once_in_one_class_and_are_accounted_for() -> None:
    world = Tiered("tp2@0-1", ablation=ARRIVAL)
    load_up(world)
    assert world.placed() == {"tp2@0-1": ["long", "late", "refused", "night"]}
    assert {world.admission.priority(rid) for rid in world.placed()["tp2@0-1"]} == {1}
    world.finish("tp2@0-1", "long", "late", "refused", "night")
    assert {report.rid: report.terms.tier for report in world.reports} == {
        "long": "strict",
        "late": "strict",
        "refused": "picky",
        "night": "night",
    }
    world.check()


def test_the_same_load_by_targets_is_refused_and_waits() -> None:
    world = Tiered("tp2@0-1")
    load_up(world)
    assert world.placed() == {"tp2@0-1": ["long"]}
    assert world.router.in_flight == 3


def test_by_arrival_a_tiers_queue_has_no_limit() -> None:
    world = Tiered("tp2@0-1", ablation=ARRIVAL)
    assert [world.arrive(f"r{number}", "picky") for number in range(12)] == [True] * 12
    by_targets = Tiered("tp2@0-1")
    assert False in [by_targets.arrive(f"r{number}", "picky") for number in range(12)]


def test_by_arrival_the_least_load_is_chosen_and_what_comes_without_an_engine_waits() -> None:
    world = Tiered(ablation=ARRIVAL)
    for number in range(4):
        world.arrive(f"r{number}", "strict", tokens=20)
    assert world.placed() == {"tp1@0": ["r0", "r2"], "tp1@1": ["r1", "r3"]}
    world.router.pause(["tp1@0", "tp1@1"])
    world.arrive("meanwhile", "strict")
    assert world.router.in_flight == 5
    world.router.activate(world.router.layout)
    assert "meanwhile" in [rid for rids in world.placed().values() for rid in rids]
    world.check()


def test_iterations_are_limited_by_targets_only() -> None:
    limits = {}
    for name, ablation in (("targets", Ablation()), ("arrival", ARRIVAL), ("rule", BATCH_RULE)):
        world = Tiered("tp2@0-1", ablation=ablation)
        for number in range(3):
            world.arrive(f"r{number}", "strict", tokens=20)
        limits[name] = world.admission.limits(world.router.engines["tp2@0-1"])
    assert limits["targets"] != OPEN
    assert limits["arrival"] == limits["rule"] == OPEN


def test_the_batch_rule_looks_at_the_engine_with_the_least_load_and_at_the_request_alone() -> None:
    world, by_targets = Tiered(ablation=BATCH_RULE), Tiered()
    for one in (world, by_targets):
        # One long prompt is the least load by number, and more than the targets leave.
        one.arrive("long", "strict", tokens=90)
        one.arrive("short", "strict", tokens=2)
        one.arrive("other", "strict", tokens=2)
        one.arrive("next", "strict", tokens=60)
    assert world.placed() == {"tp1@0": ["long"], "tp1@1": ["short", "other"]}
    assert by_targets.placed() == {"tp1@0": ["long"], "tp1@1": ["short", "other", "next"]}
    assert world.router.in_flight == 4


def test_the_batch_rule_refuses_nobody_and_what_waits_goes_when_there_is_room() -> None:
    world = Tiered("tp2@0-1", ablation=BATCH_RULE)
    load_up(world)
    assert world.placed() == {"tp2@0-1": ["long"]}
    assert world.router.in_flight == 4
    world.now += 82
    world.tokens("tp2@0-1", "long", [7], 1)
    world.finish("tp2@0-1", "long")
    for _ in range(40):
        world.now += 1000
        world.router.let_go()
        world.finish("tp2@0-1", *list(world.router.engines["tp2@0-1"].in_flight))
    assert sorted(report.rid for report in world.reports) == ["late", "long", "night", "refused"]
    world.check()


def test_a_tier_has_its_engines_and_no_other_tier_has_them() -> None:
    world = Tiered(ablation=Ablation(Scheduler.ARRIVAL, BY_TIER))
    for number in range(3):
        world.arrive(f"s{number}", "strict")
        world.arrive(f"p{number}", "picky")
    assert world.placed() == {"tp1@0": ["s0", "s1", "s2"], "tp1@1": ["p0", "p1", "p2"]}


def test_what_waits_for_one_tiers_engines_holds_up_no_other_tier() -> None:
    world = Tiered(ablation=Ablation(Scheduler.SLO, BY_TIER))
    world.arrive("s0", "strict", tokens=90)
    world.arrive("s1", "strict", tokens=90)
    assert world.placed() == {"tp1@0": ["s0"]}
    world.arrive("n0", "night", tokens=90)
    world.arrive("n1", "night", tokens=90)
    assert world.placed() == {"tp1@0": ["s0"], "tp1@1": ["n0"]}
    world.finish("tp1@1", "n0")
    assert world.placed()["tp1@1"] == ["n0", "n1"]
    world.finish("tp1@0", "s0")
    assert world.placed()["tp1@0"] == ["s0", "s1"]
    world.check()
