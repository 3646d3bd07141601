"""Whole deployments in simulated time: figures add up, runs repeat, switches carry, and admission is the router's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated
from simulations import TIERS, both_tiers, hardware

from sglang_adapt.core.layout import parse_layout, uniform_layout
from sglang_adapt.core.slo import SloConfig
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.price import Price
from sglang_adapt.policy.profile import MeasuredTimes
from sglang_adapt.router.traffic import Traffic
from sglang_adapt.simulate import study
from sglang_adapt.simulate.engine import Request
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.load import Arrival
from sglang_adapt.simulate.node import SimulationError
from sglang_adapt.simulate.outcome import judge
from sglang_adapt.simulate.systems import System, carries, run, split

_BURST = [Arrival(10_000 + one.at_ms, one.prompt, one.output, one.tier) for one in both_tiers(45.0, 10.0)]
FAST_AND_SLOW = [*both_tiers(4.0, 10.0), *_BURST]


def adds_up(judged: dict[str, dict[str, float | int | None]], sent: int) -> bool:
    return judged["total"]["sent"] == sent and all(
        one["sent"] == one["good"] + one["missed"] + one["refused"]  # type: ignore[operator]
        for one in judged.values()
    )


@pytest.mark.parametrize("admission", [True, False])
@pytest.mark.parametrize("interval_s", [None, 1.0])
def test_every_request_ends_once_and_a_run_repeats(admission: bool, interval_s: float | None) -> None:
    system = System(hardware(), 4, uniform_layout(1, 4), admission, interval_s)
    first, second = (run(system, FAST_AND_SLOW, TIERS) for _ in range(2))
    assert adds_up(first.judged, len(FAST_AND_SLOW))
    assert first.judged == second.judged and first.switches == second.switches
    assert all(one.refused or one.given == one.arrival.output for one in first.requests)
    assert bool(first.switches) == (interval_s is not None)


@pytest.mark.parametrize("rate", [10.0, 20.0, 40.0])
def test_it_is_the_routers_admission(rate: float) -> None:
    """Beside an engine that runs token by token behind the real router, with its messages."""
    speed = simulated.Speed(batch=12.0, token=0.06, step=6.0, request=0.6)
    sent = simulated.poisson(rate, 15.0, ("strict", "loose"), 128, 48, seed=1)
    config = SloConfig(TIERS.tiers, TIERS.default)
    for stock in (True, False):
        there = [simulated.Arrival(one.rid, one.at, one.tier, one.prompt, one.output) for one in sent]
        real = simulated.run(config, there, speed, stock=stock)
        profile = speed.profile()
        bounds = {tp: Bounds(1, 2048, 64) for tp in (1, 2)}
        times = {tp: MeasuredTimes(profile.size(tp)) for tp in (1, 2)}
        hw = Hardware(times, bounds, {1: 10**6, 2: 2 * 10**6}, 1, Price(1.0, 1e9), "", profile)
        arrivals = [Arrival(one.at, one.prompt, one.output, one.tier) for one in sent]
        ours = run(System(hw, 2, parse_layout("tp2@0-1", (1, 2), 2), admission=not stock), arrivals, config)
        assert ours.attainment == pytest.approx(real["total"], abs=0.05)
        for tier in ("strict", "loose"):
            assert ours.judged[tier]["attainment"] == pytest.approx(real[tier], abs=0.06)


def test_a_switch_carries_what_runs_and_costs_its_price() -> None:
    quick = run(System(hardware(), 4, uniform_layout(1, 4), interval_s=1.0), FAST_AND_SLOW, TIERS)
    carried = [one for one in quick.switches if one.requests]
    assert carried and all(60.0 <= one.pause_ms < 61.0 for one in carried)
    dear = System(hardware(), 4, uniform_layout(1, 4), interval_s=1.0, price=Price(5000.0, 3e11))
    slow = run(dear, FAST_AND_SLOW, TIERS)
    assert all(one.pause_ms >= 5000.0 for one in slow.switches)
    assert slow.goodput_rps <= quick.goodput_rps


def test_split_knows_no_other_tier_and_loses_none() -> None:
    arrivals = both_tiers(30.0, 10.0)
    found = split(hardware(), 4, arrivals, TIERS)
    assert adds_up(found.judged, len(arrivals))
    assert "strict: " in found.notes and "loose: " in found.notes
    assert sum(one.given for one in found.requests) == sum(one.output for one in arrivals)


def test_what_the_planner_sees_is_what_was_admitted_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    told: list[tuple[str, int]] = []
    arrived, turned_away = Traffic.arrived, Traffic.refused
    monkeypatch.setattr(Traffic, "arrived", lambda self, rid, tokens: (seen.append(rid), arrived(self, rid, tokens))[1])
    monkeypatch.setattr(
        Traffic, "refused", lambda self, tier, tokens: (told.append((tier, tokens)), turned_away(self, tier, tokens))[1]
    )
    found = run(System(hardware(), 2, uniform_layout(1, 2), interval_s=1.0), both_tiers(90.0, 4.0), TIERS)
    refused = {one.rid for one in found.requests if one.refused}
    assert refused and len(seen) == len(found.requests) - len(refused) and not refused & set(seen)
    assert told == [(one.arrival.tier, one.arrival.prompt) for one in found.requests if one.refused]


def test_roles_with_tiers_keep_what_they_promise() -> None:
    """As with mixed engines: all end once, and with admission nearly all that was let in is in time."""
    layout = parse_layout("tp2@0-1:prefill,tp2@2-3:decode", (1, 2), 4)
    arrivals = both_tiers(60.0, 8.0)
    stock, ours = (run(System(hardware(), 4, layout, admission), arrivals, TIERS) for admission in (False, True))
    for one in (stock, ours):
        assert adds_up(one.judged, len(arrivals))
    assert ours.judged["strict"]["good"] > 1.2 * stock.judged["strict"]["good"]
    assert ours.judged["strict"]["missed"] < 0.1 * ours.judged["strict"]["sent"]
    follows = run(System(hardware(), 4, layout, interval_s=1.0), FAST_AND_SLOW, TIERS)
    assert adds_up(follows.judged, len(FAST_AND_SLOW))
    assert any(one.before.roles and not one.after.roles for one in follows.switches)
    assert all(one.refused or one.given == one.arrival.output for one in follows.requests)


def test_a_load_is_carried_or_broken_off() -> None:
    system = System(hardware(), 2, uniform_layout(1, 2), admission=False)
    light, heavy = both_tiers(10.0, 5.0), both_tiers(120.0, 20.0)
    easy = carries(system, light, TIERS, 0.8)
    assert easy is not None and easy.judged == run(system, light, TIERS).judged
    assert run(system, heavy, TIERS).attainment < 0.8
    assert carries(system, heavy, TIERS, 0.8) is None


def test_scaling_finds_the_most_that_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "GPUS", (4, 8))
    setting = study.Setting(hardware(), 4, tuple(both_tiers(20.0, 6.0)), TIERS, 1.0, Price(60.0, 3e11))
    _, result = study.scaling(setting, lambda line: None)
    good = {(one["gpus"], one["system"]): one["tiers"]["total"] for one in result["runs"]}
    assert len(good) == 6 and all(one["attainment"] >= 0.8 for one in good.values())
    for system in ("ours, auto", "ours, best TP", "stock, best TP"):
        assert 1.5 < good[8, system]["goodput_rps"] / good[4, system]["goodput_rps"] < 2.8
    with pytest.raises(study.StudyError, match="--gpus 3"):
        study.scaling(replace(setting, gpus=3), lambda line: None)


def test_more_gpus_carry_more() -> None:
    arrivals = both_tiers(160.0, 5.0)
    good = [run(System(hardware(), gpus, uniform_layout(1, gpus)), arrivals, TIERS).goodput_rps for gpus in (2, 4, 8)]
    assert good[0] < good[1] < good[2]


def test_a_request_that_has_not_ended_is_a_fault() -> None:
    half = Request(0, "r0", Arrival(0.0, 10, 10, "loose"), given=3, first_ms=1.0)
    with pytest.raises(SimulationError, match="1 sent, but 0 met"):
        judge([half], TIERS, 1.0)
