"""A reason says what has decided, also where it was the tiers' weights."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_adapt.core.layout import parse_layout
from sglang_adapt.policy.demand import Demand, Terms
from sglang_adapt.policy.price import Price
from sglang_adapt.policy.reasons import why_change
from sglang_adapt.policy.situation import Option, Situation, Trigger
from sglang_adapt.policy.worth import Row, Worth

ONES, TWO = {1: 2}, {2: 1}


class MeetsAll:
    """Each layout meets the targets of each tier."""

    def meets(self, row: Row, engines: Any) -> bool:
        return True


def reason(
    serving: dict[str, tuple[float, float]],
    best: dict[str, tuple[float, float]],
    loads: dict[str, float],
    weights: dict[str, float],
    ends: tuple[float, float] | None = None,
) -> str:
    """The reason for going from two narrow engines to a wide one.

    Args:
        serving, best: carried requests/s and ms of a request by tier.
        loads, weights: by tier.
        ends: requests/s that both end within targets, if roles are compared.
    """
    rows = [Row(Demand(Terms(tier, weights[tier]), load), load, {}) for tier, load in loads.items()]
    options = []
    for at, (counts, parts) in enumerate(((ONES, serving), (TWO, best))):
        carried = {tier: rate for tier, (rate, _) in parts.items()}
        value = sum(weights[tier] * rate for tier, rate in carried.items())
        worth = Worth(value, carried, {tier: ms for tier, (_, ms) in parts.items()})
        options.append(Option(counts, worth, ends_rps=None if ends is None else ends[at]))
    now = Situation(
        tuple(row.demand for row in rows), (), 2, parse_layout("tp1@0,tp1@1", (1, 2), 2), {}, Price(1.0, 1e9)
    )
    trigger, told, row = why_change(rows, options[1], options[0], now, _speeds(), MeetsAll())  # type: ignore[arg-type]
    assert (trigger, row) == (Trigger.LOAD, None)
    return told


def _speeds() -> Any:
    class Holds:
        request_tokens = 1000

    return {1: Holds(), 2: Holds()}


@pytest.mark.parametrize(
    ("serving", "best"),
    [
        # It carries more.
        ({"a": (5, 100), "b": (5, 100)}, {"a": (8, 100), "b": (4, 100)}),
        # It alone keeps up.
        ({"a": (5, 100), "b": (5, 100)}, {"a": (10, 900), "b": (10, 900)}),
        # Both keep up, and it is quicker.
        ({"a": (10, 100), "b": (10, 100)}, {"a": (10, 50), "b": (10, 60)}),
    ],
)
def test_loads_and_times_are_enough_where_they_speak_for_it(serving: Any, best: Any) -> None:
    assert "is worth" not in reason(serving, best, {"a": 10.0, "b": 10.0}, {"a": 4.0, "b": 1.0})


def test_weights_are_told_where_they_have_decided() -> None:
    told = reason(
        {"a": (2, 100), "b": (10, 100)}, {"a": (8, 100), "b": (2, 100)}, {"a": 10.0, "b": 10.0}, {"a": 4.0, "b": 1.0}
    )
    assert told == (
        "load 20 req/s: 2 x TP 1 carries 12 of it, 1 x TP 2 carries 10 of it; by weights and times 2 x TP 1 is worth "
        "18, 1 x TP 2 34, as of tier a (weight 4) it carries 8 instead of 2"
    )


def test_times_are_told_where_they_have_decided() -> None:
    told = reason({"a": (9, 200)}, {"a": (8.9, 20)}, {"a": 10.0}, {"a": 1.0})
    assert "; by loads and times together 2 x TP 1 is worth 9, 1 x TP 2 8.9" in told
    assert "of tier" not in told


def test_slower_and_chosen_is_told_by_weight() -> None:
    told = reason(
        {"a": (10, 100), "b": (10, 10)}, {"a": (10, 50), "b": (10, 90)}, {"a": 10.0, "b": 10.0}, {"a": 9.0, "b": 1.0}
    )
    assert "carries it in 55 ms a request, 1 x TP 2 carries it in 70 ms a request; by weights and times" in told
