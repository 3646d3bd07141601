"""The bursty load of the benchmark of sequence parallelism, and how its peak is counted."""

from __future__ import annotations

import pytest

from bursts import Bursts, bursty, peak_tokens_per_s
from load import Request, Timing

LOAD = Bursts(count=2, requests=10, rate=5.0, every_s=8.0, steady_rate=1.0)


def test_bursts_come_on_top_of_a_steady_stream() -> None:
    requests = bursty(LOAD, 100, 7, seed=1)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < LOAD.seconds == 16
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(100, 7)}
    for begin_s in (4.0, 12.0):
        assert sum(begin_s <= at < begin_s + 2 for at in arrivals) >= LOAD.requests
    assert len(requests) > 20, "there are requests between the bursts"
    assert requests == bursty(LOAD, 100, 7, seed=1) != bursty(LOAD, 100, 7, seed=2)


def test_without_a_stream_there_are_bursts_alone() -> None:
    quiet = Bursts(count=2, requests=10, rate=5.0, every_s=8.0, steady_rate=0.0)
    assert len(bursty(quiet, 100, 7, seed=1)) == 20


def test_the_peak_is_the_busiest_window() -> None:
    requests = [Request(0.0, 100, 3), Request(1.0, 50, 1), Request(1.0, 9000, 5)]
    timings = [
        # Its prompt and first token at 1.5 s, the others at 2.5 and 3.5 s.
        Timing(1500.0, 1000.0, 3500.0, 3, None, sent_s=0.0),
        # All of it at 1.2 s.
        Timing(200.0, None, 200.0, 1, None, sent_s=1.0),
        # One that failed counts nothing.
        Timing(None, None, 10.0, 0, "HTTP 503", sent_s=1.0),
    ]
    assert peak_tokens_per_s(requests, timings, window_s=1.0) == pytest.approx(100 + 1 + 50 + 1)
    assert peak_tokens_per_s(requests, timings, window_s=4.0) == pytest.approx((100 + 3 + 50 + 1) / 4)
    assert peak_tokens_per_s([], [], window_s=1.0) == 0
