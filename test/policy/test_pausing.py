"""When the requests of engines that leave are paused in place for a tier with tight targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner import FOUR, ONES, SPEEDS, demand, row

from sglang_adapt.core.layout import Layout, parse_layout
from sglang_adapt.policy.assign import promises
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.policy.demand import Unfinished
from sglang_adapt.policy.pausing import Needy, must_yield, strategy_for
from sglang_adapt.policy.price import Running
from sglang_adapt.policy.worth import Row

# Met at TP 4 only.
STRICT = demand(1.0, "strict", 400, 4.5, weight=4)
LOOSE = Running(requests=5, kv_bytes=1e6, kv_share=0.4, most_weight=1.0)


def layout(text: str) -> Layout:
    return parse_layout(text, (1, 2, 4), 4)


def decided(running: dict[str, Running], asker: Row | None = None, before: str = ONES, after: str = FOUR) -> Strategy:
    speeds = {one.tp: one for one in SPEEDS}
    return strategy_for(asker or row(STRICT, 1.0), layout(before), layout(after), running, speeds, 5.0)


def test_work_of_less_weight_is_paused_where_there_is_room_beside_it() -> None:
    assert decided({"tp1@0": LOOSE, "tp1@2": LOOSE}) is Strategy.KEEP


def test_what_weighs_as_much_is_moved() -> None:
    assert decided({"tp1@0": LOOSE, "tp1@2": replace(LOOSE, most_weight=4.0)}) is Strategy.AUTO
    # On an engine that stays it does not matter.
    heavy = {"tp1@0": LOOSE, "tp2@2-3": replace(LOOSE, most_weight=9.0)}
    asker = row(demand(1.0, "strict", 400, 7, weight=4), 1.0)
    assert decided(heavy, asker, "tp1@0,tp1@1,tp2@2-3", "tp2@0-1,tp2@2-3") is Strategy.KEEP


def test_where_nothing_runs_there_is_nothing_to_pause() -> None:
    assert decided({}) is Strategy.AUTO
    assert decided({"tp1@0": Running()}) is Strategy.AUTO


@pytest.mark.parametrize(("share", "strategy"), [(0.97, Strategy.KEEP), (0.98, Strategy.AUTO)])
def test_the_longest_request_of_a_narrow_engine_fits_beside_what_is_paused(share: float, strategy: Strategy) -> None:
    # 4,000 of 160,000 tokens; the fullest GPU counts.
    assert decided({"tp1@0": LOOSE, "tp1@2": replace(LOOSE, kv_share=share)}) is strategy


@pytest.mark.parametrize(("requests", "strategy"), [(150, Strategy.KEEP), (160, Strategy.AUTO)])
def test_what_the_tier_asks_for_fits_beside_what_is_paused(requests: int, strategy: Strategy) -> None:
    # 600 tokens each, and one a second for 5 s, in 0.6 of 160,000.
    asker = row(replace(STRICT, unfinished=Unfinished(requests, 0)), 1.0)
    assert decided({"tp1@0": LOOSE}, asker) is strategy


def test_a_tier_without_an_engine_that_is_up_is_promised_on_all() -> None:
    tiers = {"tp1@0": ("a",), "tp1@1": ("b",)}
    a, b, c = "abc"
    both = ["tp1@0", "tp1@1"]
    assert promises(tiers, [a, b], both) == {"tp1@0": frozenset(a), "tp1@1": frozenset(b)}
    assert promises(tiers, [a, b, c], both) == {"tp1@0": frozenset("ac"), "tp1@1": frozenset("bc")}
    assert promises(tiers, [a, b], ["tp1@1"]) == {"tp1@0": frozenset(a), "tp1@1": frozenset("ab")}
    assert promises({}, [a, b], []) == {}


def test_only_what_is_kept_on_its_gpus_yields_to_a_request_and_only_if_it_must() -> None:
    kept = {"tp1@0": (0,), "tp1@1": (1,), "tp1@3": (3,)}
    fits = Needy("fits", (0, 1, 2, 3), 100, 100)
    assert must_yield([fits], kept) == {}
    first, second = Needy("first", (0, 1), 101, 100), Needy("second", (0, 1), 500, 100)
    assert must_yield([fits, first, second], kept) == {"tp1@0": first, "tp1@1": first}
    assert must_yield([Needy("elsewhere", (2,), 101, 100)], kept) == {}
