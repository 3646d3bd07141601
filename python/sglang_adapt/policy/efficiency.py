"""What one engine can do for a tier at each TP size: its goodput, and how long requests take at each load.

Nitsum, 3.3.1, estimates the highest prefill and decode rates within the targets and balances them. There they are
different GPUs; here an engine does both. With `B` requests on it, `B / output` of them end in each decode step and as
many prompts are read, so one step takes `decode(B) + B x prefill / output`, which is TPOT, and the engine ends `B`
requests every `output` steps. That is the balance: one unknown, `B`. The largest whose TTFT and TPOT stay within the
targets gives the goodput. Prompts are cut as in `policy.limits`, targets have the margin of `policy.admission`, and its
`prompts_ms` gives TTFT, so that what is planned is admitted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from sglang_adapt.policy.admission import WINDOW_MS, prompts_ms
from sglang_adapt.policy.demand import Demand
from sglang_adapt.policy.limits import SAFETY, Bounds, chunk_tokens
from sglang_adapt.policy.profile import Times

_HALVINGS = 6
"""Steps of the search for the largest batch; it is found to 2 %."""
_ALONE = 1e-6
"""The batch of an engine that is nearly always idle."""
_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Times of requests are known at these powers of the largest batch, and in between on straight lines."""
_BUSIEST = 0.98
"""Prompts never take more of an engine's time: behind a longer queue nobody would wait."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One TP size here.

    Attributes:
        tp: the size.
        times: of its engines.
        bounds: of their iterations.
        kv_tokens: that all requests of an engine can have together.
        request_tokens: that the longest one can have.
    """

    tp: int
    times: Times
    bounds: Bounds
    kv_tokens: int
    request_tokens: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """One engine of TP size `tp` with requests of one tier only.

    Attributes:
        tp: its size.
        capacity_rps: the most that it ends within the targets; 0: it cannot meet them even for one request alone.
        ttft_ms, tpot_ms: at that rate; of one request alone if it is 0.
        batch: requests on it then, in the mean.
        rates_rps, times_ms: the time of a request, TTFT and all tokens, at rates from 0 to the capacity.
    """

    tp: int
    capacity_rps: float
    ttft_ms: float
    tpot_ms: float
    batch: float
    rates_rps: tuple[float, ...]
    times_ms: tuple[float, ...]

    @property
    def alone_ms(self) -> float:
        """The time of a request that has the engine for itself."""
        return self.times_ms[0]

    def time_ms(self, load: float) -> float:
        """The time of a request while the engine has `load` of its capacity, from 0 to 1."""
        rate = load * self.capacity_rps
        at = bisect_right(self.rates_rps, rate) - 1
        if at >= len(self.rates_rps) - 1:
            return self.times_ms[-1]
        low, high = self.rates_rps[at], self.rates_rps[at + 1]
        share = (rate - low) / (high - low) if high > low else 0.0
        return self.times_ms[at] + share * (self.times_ms[at + 1] - self.times_ms[at])


class _Engine:
    """An engine under `B` equal requests."""

    def __init__(self, demand: Demand, speed: Speed, ttft_ms: float | None, tpot_ms: float | None) -> None:
        self.prompt = max(1.0, demand.prompt_tokens)
        self.output = max(1.0, demand.output_tokens)
        self._spread = demand.prompt_spread
        self._context = self.prompt + self.output / 2
        self._times, self._decode_ms, self._latency_ms = speed.times, speed.times.decode_ms, speed.times.latency_ms
        self.most_ttft_ms = math.inf if ttft_ms is None else SAFETY * ttft_ms
        self.most_tpot_ms = math.inf if tpot_ms is None else SAFETY * tpot_ms
        self._tpot_ms = math.inf if tpot_ms is None else tpot_ms
        self._bounds = speed.bounds
        self.most = float(min(speed.bounds.requests, speed.kv_tokens / (self.prompt + self.output)))
        # A prompt costs this much of an engine's time, and its request waits so long for it beside decode steps.
        self._whole_ms = self._read_ms = speed.times.prefill_ms(self.prompt)
        self._chunk: int | None = None
        self._steps: dict[float, float] = {}

    def step_ms(self, batch: float) -> float:
        there = batch if batch > 1.0 else 1.0
        known = self._steps.get(there)
        if known is None:
            known = self._steps[there] = self._decode_ms(there, there * self._context)
        return known

    def cut(self, batch: float) -> None:
        """Cut prompts as an engine does that has this batch; a smaller one cuts them into larger parts."""
        step = self.step_ms(batch)
        share = min(1.0, batch * self._whole_ms / (batch * self._whole_ms + self.output * step))
        chunk = chunk_tokens(self._times, step, self._tpot_ms, self._bounds, share)
        self._chunk, self._read_ms = None, self._whole_ms
        if self.prompt > chunk:
            self._chunk = chunk
            self._read_ms = max(self._whole_ms, self.prompt / chunk * self._times.prefill_ms(chunk))

    def at(self, batch: float) -> tuple[float, float, float]:
        """(requests/s, TTFT, TPOT) with `batch` > 0 requests in the mean."""
        return self._at(batch, self.step_ms(batch))

    def _at(self, batch: float, step: float) -> tuple[float, float, float]:
        tpot = step + batch * self._read_ms / self.output
        rate = batch / (self.output * tpot)
        alone = self._read_ms
        if self._chunk is not None:
            alone = prompts_ms(self._times, self.prompt, 0.0, step, self._chunk)
        busy = rate * alone
        # Prompts of others that are before it: as in a queue with one server (M/G/1).
        wait = math.inf if busy >= _BUSIEST else (1 + self._spread) * alone * busy / (2 * (1 - busy))
        return 1e3 * rate, self._latency_ms + step + alone + wait, tpot

    def fits(self, batch: float) -> bool:
        most, step = self.most_tpot_ms, self.step_ms(batch)
        if step > most:
            return False
        rate, ttft, tpot = self._at(batch, step)
        if tpot > most or ttft > self.most_ttft_ms or ttft == math.inf:
            return False
        if self._chunk is not None or most == math.inf:
            return True
        # Admission counts the one that comes next, and its prompt among those of the last time.
        share = (rate / 1e3 + 1 / WINDOW_MS) * self._whole_ms
        return share < 1 and self.step_ms(batch + 1) / (1 - share) <= most

    def largest(self, most: float) -> float:
        """The largest batch up to `most` that stays within the targets; 0 if none does."""
        if self.fits(most):
            return most
        # First by powers of two, of which `most` is the last: `low` fits, `high` does not.
        under, over = -1, max(0, math.ceil(math.log2(most)))
        while over - under > 1:
            power = (under + over) // 2
            under, over = (power, over) if self.fits(2.0**power) else (under, power)
        low, high = 2.0**under if under >= 0 else 0.0, min(most, 2.0**over)
        if not low and not self.fits(_ALONE):
            return 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def largest_cut(self, most: float) -> float:
        """The largest batch up to `most` that stays within the targets with prompts cut as they are at that batch.

        Leaves them cut so; 0 if there is none. Uncut prompts stay within the targets at `most`.
        """
        self.cut(most)
        if self._chunk is None or self.fits(most):
            return most
        low, high = 0.0, most
        for _ in range(_HALVINGS - 1):
            batch = (low + high) / 2
            self.cut(batch)
            low, high = (batch, high) if self.fits(batch) else (low, batch)
        self.cut(max(low, _ALONE))
        return low or self.largest(high)


def estimate(
    demand: Demand, speed: Speed, ttft_ms: float | None = None, tpot_ms: float | None = None, *, own: bool = True
) -> Estimate:
    """What an engine can do for a tier.

    Args:
        demand: its requests' lengths count, and its targets.
        speed: of the engine.
        ttft_ms, tpot_ms: other targets, where engines are shared with a tighter tier.
        own: take the tier's own targets.
    """
    if own:
        ttft_ms, tpot_ms = demand.terms.ttft_ms, demand.terms.tpot_ms
    engine = _Engine(demand, speed, ttft_ms, tpot_ms)
    if engine.prompt + engine.output > speed.request_tokens:
        batch = 0.0
    else:
        batch = engine.largest(engine.most)
        if batch and tpot_ms is not None:
            batch = engine.largest_cut(batch)
    _, ttft, tpot = engine.at(_ALONE)
    capacity, fullest, rates, times = 0.0, 0.0, [0.0], [ttft + (engine.output - 1) * tpot]
    # Close together where the batch is small: there the rate rises fastest. Up to 1 all powers are the same.
    for power in () if not batch else _POWERS if batch > 1 else _POWERS[:1]:
        there = min(1.0, batch) * max(1.0, batch) ** power
        rate, later_ttft, later_tpot = engine.at(there)
        # By some measurements a larger batch ends no more requests; then nobody would want it.
        if rate > capacity:
            capacity, ttft, tpot, fullest = rate, later_ttft, later_tpot, there
            rates.append(rate)
            times.append(ttft + (engine.output - 1) * tpot)
    return Estimate(speed.tp, capacity, ttft, tpot, fullest, tuple(rates), tuple(times))


def with_shorter_prompts(found: Estimate, demand: Demand, speed: Speed, tpot_ms: float | None) -> Estimate:
    """The estimate `found`, if prompts were shorter: of how many requests a second, in about the same times.

    Args:
        found: with a capacity.
        demand: the same with shorter prompts.
        speed: of the engine.
        tpot_ms: the target of which `found` is.
    """
    engine = _Engine(demand, speed, demand.terms.ttft_ms, tpot_ms)
    low, high = found.batch, engine.most
    if tpot_ms is not None:
        engine.cut(low)
    while low < high and engine.fits(min(2 * low, high)):
        low = min(2 * low, high)
    high = min(2 * low, high)
    for _ in range(_HALVINGS - 1):
        middle = (low + high) / 2
        low, high = (middle, high) if engine.fits(middle) else (low, middle)
    rate = max(found.capacity_rps, engine.at(low)[0])
    rates = tuple(each * rate / found.capacity_rps for each in found.rates_rps)
    return Estimate(found.tp, rate, found.ttft_ms, found.tpot_ms, low, rates, found.times_ms)
