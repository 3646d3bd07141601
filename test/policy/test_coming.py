"""An engine's load as soon as a request comes to it."""

from __future__ import annotations

import math

from sglang_adapt.policy.admission import Load
from sglang_adapt.policy.coming import own_ms, with_coming


class Linear:
    """A token of a prompt takes 1 ms, and each before it a hundredth; a step takes 1 ms a request."""

    latency_ms = 0.0

    def prefill_ms(self, tokens: float, prefix: float = 0.0) -> float:
        return tokens + prefix / 100

    def decode_ms(self, requests: float, context: float) -> float:
        return requests


def test_what_is_cached_is_not_read() -> None:
    assert own_ms(Load("a", Linear()), 500) == 500
    assert own_ms(Load("a", Linear(), cached=400), 500) == 104
    assert own_ms(Load("a", Linear(), cached=500), 500) == 6, "the last token always is"


def test_a_request_adds_what_it_brings() -> None:
    before = Load("a", Linear(), 2, 30, 1000.0, 20.0, 7.0, cached=400)
    after = with_coming(before, 500, 60, 10.0)
    assert (after.requests, after.context, after.prefill_ms, after.tightest_tpot_ms) == (3, 1560.0, 111.0, 10.0)
    assert with_coming(before, 500, 60, 30.0).tightest_tpot_ms == 20.0


def test_what_is_promised_nothing_tightens_nothing() -> None:
    assert with_coming(Load("a", Linear()), 500, 0, None).tightest_tpot_ms == math.inf
