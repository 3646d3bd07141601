"""How goodput is counted."""

from __future__ import annotations

import argparse
import random

import pytest

from bench_goodput import Seen, TierLoad, faster, judge, parse_tier, poisson, table

STRICT, LOOSE = TierLoad("strict", 1, 100, 10), TierLoad("loose", 1, 500, 50)


def test_refused_failed_and_late_requests_are_sent_but_not_good() -> None:
    seen = [
        Seen("strict", 200, 90.0, 9.0, 5),
        Seen("strict", 200, 110.0, 9.0, 5),
        Seen("strict", 200, 90.0, 11.0, 5),
        Seen("strict", 429, None, None, 0),
        Seen("strict", 503, None, None, 0),
        Seen("loose", 200, 110.0, None, 1),
    ]
    judged = judge(seen, [STRICT, LOOSE], 2.0)
    strict = judged["strict"]
    assert (strict["sent"], strict["refused"], strict["failed"]) == (5, 1, 1)
    assert (strict["met_ttft"], strict["met_tpot"], strict["good"]) == (2, 2, 1)
    assert (strict["goodput_rps"], strict["attainment"]) == (0.5, 0.2)
    assert (judged["total"]["sent"], judged["total"]["good"]) == (6, 2)
    assert len(table(judged).splitlines()) == 4


def test_arrivals() -> None:
    requests = poisson(10, 100, 20, 8, random.Random(0))
    assert 850 < len(requests) < 1150
    assert all(10 <= r.input_tokens <= 30 and 4 <= r.output_tokens <= 12 for r in requests)
    assert faster(requests, 2)[-1].arrival_s == requests[-1].arrival_s / 2


def test_tiers() -> None:
    assert parse_tier("strict:1:100:10") == STRICT
    for text in ("strict", "strict:1:2", "a:0:1:1", "a:1:-1:1", "a:x:1:1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_tier(text)
