"""How many engines prefill and how many decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_efficiency import h100

from sglang_adapt.policy.demand import Demand, Terms
from sglang_adapt.policy.efficiency import estimate
from sglang_adapt.policy.limits import SAFETY
from sglang_adapt.policy.split import decode_rps, prefill_rps, split

CODE = Demand(Terms("code", 1.0, 1000, 12), 1.0, 6000, 40)
CHAT = Demand(Terms("chat", 1.0, 1000, 30), 1.0, 200, 400)


def test_long_prompts_beside_tight_steps_are_split_and_short_ones_are_not() -> None:
    code, chat = split(CODE, h100(1), 4), split(CHAT, h100(1), 4)
    assert code.is_split
    assert code.split_rps > code.mixed_rps
    assert f"{code.prefill} that prefill and {code.decode} that decode carry" in code.reason
    assert not chat.is_split
    assert (chat.prefill, chat.decode) == (0, 0)
    assert chat.reason.startswith("4 mixed engines carry")
    assert "bottleneck" in chat.reason


def test_more_output_asks_for_more_engines_that_decode() -> None:
    demand = replace(CODE, prompt_tokens=2000)
    splits = [split(replace(demand, output_tokens=output), h100(1), 8) for output in (20, 400, 3000)]
    best = [one.split_rps for one in splits]
    assert best[0] > best[1] > best[2] > 0
    stages = [
        decode_rps(replace(demand, output_tokens=output), h100(1)) / prefill_rps(demand, h100(1))
        for output in (20, 400, 3000)
    ]
    assert stages[0] > stages[1] > stages[2]


@given(st.integers(1, 8), st.integers(16, 8000), st.integers(2, 1500), st.integers(50, 4000), st.integers(5, 80))
def test_the_best_of_all_is_taken(engines: int, prompt: int, output: int, ttft: int, tpot: int) -> None:
    demand, speed = Demand(Terms("t", 1.0, ttft, tpot), 1.0, prompt, output), h100(1)
    found = split(demand, speed, engines)
    assert found.mixed_rps == pytest.approx(engines * estimate(demand, speed).capacity_rps)
    reads, decodes = prefill_rps(demand, speed), decode_rps(demand, speed)
    every = [min(count * reads, (engines - count) * decodes) for count in range(1, engines)]
    assert found.split_rps == pytest.approx(max(every, default=0.0))
    assert found.is_split == (found.split_rps > found.mixed_rps)
    assert (found.prefill + found.decode) in ((engines,) if found.is_split else (0,))


def test_targets_that_cannot_be_met_carry_nothing() -> None:
    speed = h100(1)
    assert prefill_rps(replace(CODE, terms=Terms("t", 1.0, 1, 12)), speed) == 0
    assert decode_rps(replace(CODE, terms=Terms("t", 1.0, 1000, 1)), speed) == 0
    found = split(replace(CODE, terms=Terms("t", 1.0, 1, 1)), speed, 4)
    assert (found.is_split, found.split_rps, found.mixed_rps) == (False, 0, 0)
    assert "no split meets the targets" in found.reason
    assert "there is one engine" in split(CODE, speed, 1).reason


def test_a_prompt_waits_for_others_as_in_a_queue() -> None:
    speed = h100(1)
    alone = speed.times.prefill_ms(CODE.prompt_tokens)
    busy = prefill_rps(CODE, speed) * alone / 1e3
    assert busy < 0.98
    assert alone + alone * busy / (2 * (1 - busy)) == pytest.approx(SAFETY * 1000)
