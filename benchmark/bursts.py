"""A steady stream of requests with bursts, and the busiest moment of a load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from load import Request, Timing, poisson_arrivals


@dataclass(frozen=True)
class Bursts:
    """The bursty workload of the Shift Parallelism paper (section 4.2.1) in figures of its own, which it does not give.

    Attributes:
        count: bursts.
        requests: of each.
        rate: requests/s within a burst.
        every_s: from the beginning of one to that of the next; the first begins half of it after the start.
        steady_rate: requests/s of the stream, Poisson, from the start until half of `every_s` after the last burst.
    """

    count: int
    requests: int
    rate: float
    every_s: float
    steady_rate: float

    @property
    def seconds(self) -> float:
        """How long requests arrive."""
        return self.count * self.every_s


def bursty(bursts: Bursts, input_tokens: int, output_tokens: int, seed: int) -> list[Request]:
    """Requests in the order of their arrival; the same for the same seed."""
    rng = random.Random(seed)
    arrivals = list(poisson_arrivals(bursts.steady_rate, bursts.seconds, rng)) if bursts.steady_rate > 0 else []
    for number in range(bursts.count):
        begins_s = (number + 0.5) * bursts.every_s
        arrivals += [begins_s + index / bursts.rate for index in range(bursts.requests)]
    return [Request(at_s, input_tokens, output_tokens) for at_s in sorted(arrivals)]


def peak_tokens_per_s(requests: Sequence[Request], timings: Sequence[Timing], window_s: float) -> float:
    """Most tokens/s of input and output within a window of `window_s`.

    A prompt counts when its first token came, output tokens evenly from there to the last one. Windows begin with
    the load and follow each other.
    """
    windows: Counter[int] = Counter()
    for request, timing in zip(requests, timings, strict=True):
        if timing.error is not None or timing.ttft_ms is None:
            continue
        first_s = timing.sent_s + timing.ttft_ms / 1000
        gap_s = (timing.tpot_ms or 0.0) / 1000
        windows[int(first_s // window_s)] += request.input_tokens
        windows.update(int((first_s + number * gap_s) // window_s) for number in range(timing.tokens))
    return max(windows.values(), default=0) / window_s
