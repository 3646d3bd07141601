"""What an engine that only reads prompts, and one that only decodes, can do for a tier.

Nitsum, 3.3.1: the highest rates of prefill and of decode within the targets, which `policy.division` balances. Targets
and margins are those of `policy.efficiency`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.efficiency import Speed
from sglang_adapt.policy.limits import SAFETY

HANDOVER_MS = 15.0
"""What a hand-over adds to the time of a request beyond a decode step, until it has been seen. Not yet measured on
GPUs; 13 ms on virtual GPUs of two CPU cores that others used as well, so this is on the safe side."""
_BUSIEST = 0.98
"""Prompts never take more of an engine's time, as in `policy.efficiency`."""
_HALVINGS = 6
"""Steps of the search for the largest batch; it is found to 2 %."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine that only reads.

    Attributes:
        alone_ms: a prompt that is alone.
        each_ms: one of as many as are read in an iteration.
        latency_ms: of a first token, beside.
        room: prompts that may be before one that is still in time; infinite without a target.
    """

    alone_ms: float
    each_ms: float
    latency_ms: float
    room: float

    @property
    def rps(self) -> float:
        """The most prompts a second."""
        return 1e3 * _BUSIEST / self.each_ms

    def ttft_ms(self, load: float, spread: float) -> float:
        """Time to the first token at a part of that rate; never longer than the target allows."""
        busy = min(load, 1.0) * _BUSIEST
        wait = min(self.room, (1 + spread) * busy / (2 * (1 - busy))) * self.each_ms
        return self.latency_ms + self.alone_ms + wait


@dataclass(frozen=True, slots=True)
class Decoding:
    """One engine that only decodes: a step takes `fixed_ms` and `request_ms` for each of its requests.

    Attributes:
        most: requests with which steps are still within the target.
        output: tokens of a request.
        handover_ms: that each takes to come.
    """

    fixed_ms: float
    request_ms: float
    most: float
    output: float
    handover_ms: float

    def rps(self, batch: float) -> float:
        """Requests a second that end with so many on the engine in the mean."""
        return 1e3 * batch / (self.output * self.step_ms(batch) + self.handover_ms)

    def step_ms(self, batch: float) -> float:
        return self.fixed_ms + self.request_ms * batch

    def time_ms(self, rate_rps: float) -> float:
        """From first token to last one, at a rate that the engine carries."""
        growth = min(0.99, rate_rps / 1e3 * self.output * self.request_ms)
        step = min(self.fixed_ms / (1 - growth), self.step_ms(self.most))
        return self.handover_ms + (self.output - 1) * step


def reading(demand: Demand, speed: Speed) -> Reading | None:
    """What an engine reads for a tier; None if it cannot read one prompt in time, or hold it."""
    prompt = max(1.0, demand.prompt_tokens)
    alone = speed.times.prefill_ms(prompt)
    room = math.inf
    if demand.terms.ttft_ms is not None:
        spare = SAFETY * demand.terms.ttft_ms - speed.times.latency_ms - alone
        if spare < 0:
            return None
        room = spare / alone
    if prompt > speed.request_tokens:
        return None
    # What is read together takes no longer than one prompt of all its tokens, as in `admission.reading_ms`.
    several = math.floor(min(speed.bounds.prefill_tokens / prompt, 1 + room))
    each = min(alone, speed.times.prefill_ms(several * prompt) / several) if several > 1 else alone
    return Reading(alone, each, speed.times.latency_ms, room)


def decoding(demand: Demand, speed: Speed, tpot_ms: float, handover_ms: float) -> Decoding | None:
    """What an engine decodes for a tier; None if it cannot decode one request in time, or hold it.

    Args:
        demand: its requests' lengths count.
        speed: of the engine.
        tpot_ms: the target; infinite without one.
        handover_ms: that a request takes to come.
    """
    prompt, output = max(1.0, demand.prompt_tokens), max(1.0, demand.output_tokens)
    context = prompt + output / 2
    # The hand-over is a part of the first interval.
    longest = SAFETY * tpot_ms - handover_ms / output
    most = min(float(speed.bounds.requests), speed.kv_tokens / (prompt + output))
    first = speed.times.decode_ms(1.0, context)
    if most < 1 or prompt + output > speed.request_tokens or first > longest:
        return None
    last = speed.times.decode_ms(most, most * context)
    if last > longest:
        low, high = 1.0, most
        for _ in range(_HALVINGS):
            # Steps grow about evenly with the batch, so a straight line is near at once.
            at = (longest - first) / (last - first) if last > first else 0.5
            middle = low + (high - low) * min(max(at, 0.02), 0.98)
            step = speed.times.decode_ms(middle, middle * context)
            if step <= longest:
                low, first = middle, step
                if longest - step < 0.01 * longest:
                    break
            else:
                high, last = middle, step
        most = low
    alone = speed.times.decode_ms(1.0, context)
    slope = (speed.times.decode_ms(most, most * context) - alone) / (most - 1) if most > 1 else 0.0
    return Decoding(max(alone - slope, 1e-9), slope, most, output, handover_ms)
