"""What engines do that only read or only decode, and how they are divided."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from test_efficiency import h100

from sglang_adapt.core.layout import parse_layout
from sglang_adapt.policy.demand import Demand, Terms
from sglang_adapt.policy.division import Divider, Division, division_of, with_roles
from sglang_adapt.policy.efficiency import estimate
from sglang_adapt.policy.limits import SAFETY
from sglang_adapt.policy.stages import decoding, reading
from sglang_adapt.policy.worth import Appraiser, Row

CODE = Demand(Terms("code", 1.0, 300, 10), 30.0, 2000, 93)


def test_targets_that_cannot_be_met_give_no_engine() -> None:
    assert reading(replace(CODE, terms=Terms("t", 1.0, 1, 12)), h100(1)) is None
    assert decoding(CODE, h100(1), 1.0, 3.0) is None
    assert reading(replace(CODE, terms=Terms("t")), h100(1)) is not None


def test_a_full_batch_is_just_within_the_target() -> None:
    speed = h100(2)
    found = decoding(CODE, speed, 6.0, 15.0)
    assert found is not None and 1 < found.most < speed.bounds.requests
    context = CODE.prompt_tokens + CODE.output_tokens / 2
    longest = SAFETY * 6.0 - 15.0 / CODE.output_tokens
    assert 0.97 * longest <= speed.times.decode_ms(found.most, found.most * context) <= longest
    # A rate gives the batch at which it is carried, and so the time.
    assert found.time_ms(found.rps(found.most)) == pytest.approx(
        15.0 + (CODE.output_tokens - 1) * found.step_ms(found.most), rel=0.02
    )


def divider(demand: Demand) -> Divider:
    speeds = {tp: h100(tp) for tp in (1, 2, 4)}
    row = Row(demand, demand.rate_rps, {tp: estimate(demand, one) for tp, one in speeds.items()})
    return Divider((row,), speeds, Appraiser((row,), speeds), 15.0)


def test_more_output_asks_for_more_gpus_that_decode() -> None:
    readers = []
    for output in (20, 400, 2000):
        best = divider(replace(CODE, output_tokens=output, rate_rps=100.0)).best(32, 0)[0]
        readers.append(sum(tp * number for tp, number in best.reads.items()))
        assert readers[-1] + sum(tp * number for tp, number in best.decodes.items()) == 32
    assert readers[0] > readers[1] > readers[2] > 0


def test_a_division_carries_no_more_than_either_kind_does() -> None:
    asked = replace(CODE, rate_rps=500.0)
    few, even = (divider(asked).worth(Division({}, {2: one}, {2: 4 - one})).carried_rps["code"] for one in (1, 2))
    assert 1.8 * few < even < 2.2 * few
    assert divider(asked).worth(Division({}, {2: 4}, {})).carried_rps["code"] == 0.0


def test_roles_stay_where_they_are() -> None:
    now = parse_layout("tp1@0:prefill,tp1@1:decode,tp1@2:decode,tp1@3:decode", (1,), 4)
    assert division_of(now) == Division(Counter(), Counter({1: 1}), Counter({1: 3}))
    busy = {"tp1@1": 9.0, "tp1@2": 1.0, "tp1@3": 5.0}
    two = with_roles(now, Division({}, {1: 2}, {1: 2}), now, busy)
    assert str(two) == "tp1@0:prefill,tp1@1:decode,tp1@2:prefill,tp1@3:decode"
