"""What engines have to do and how fast they are, as `policy.admission` wants it: kept up from what passes here."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Literal

from sglang_adapt.core.slo import Tier
from sglang_adapt.policy.admission import WINDOW_MS, Job, Load, forecast, prompts_ms
from sglang_adapt.policy.limits import Bounds, chunk_tokens
from sglang_adapt.policy.profile import Corrected, Correction
from sglang_adapt.policy.tally import Tally
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.router.engine import Engine

_BEGINNINGS = (1024, 256, 64)
"""Lengths of prompts' beginnings, in tokens, by which engines are remembered."""
_REMEMBERED = 8192
_EXPECTED_MS = 10_000.0
"""A tier that has had a request in this time is expected to have another one, for which room is left."""
_SPARE_OF_TTFT = 0.5
"""Work without a promise may put prompts before the next feasible request for this part of the smallest TTFT target of
the tiers that are expected."""

Beginnings = tuple[tuple[int, bytes], ...]
"""(tokens, key) of a prompt's beginnings, the longest first."""


class EngineLoads:
    """See the module.

    Args:
        settings: speed, and whether it was measured.
        tp_of: TP size of every engine, by name.
        bounds: of an engine's iterations, by TP size.
        tiers: which there are now.
        clock_ms: CLOCK_MONOTONIC in ms.

    Attributes:
        tally: requests of each engine, as sums.
        corrections: of reckoned times, by TP size, learned from what engines do.
        bounds: as given.
    """

    def __init__(
        self,
        settings: TierSettings,
        tp_of: Mapping[str, int],
        bounds: Mapping[int, Bounds],
        tiers: Callable[[], Sequence[Tier]],
        clock_ms: Callable[[], float],
    ) -> None:
        self._times = {tp: settings.times(tp) for tp in set(tp_of.values())}
        most = 4.0 if settings.profile is not None else 32.0
        self.corrections = {tp: Correction(most=most) for tp in self._times}
        self.tally = Tally()
        self.bounds = bounds
        self._tp_of = tp_of
        self._tiers = tiers
        self._clock_ms = clock_ms
        self._tiers_of: Mapping[str, frozenset[str]] = {}
        self._prefill: dict[str, tuple[float, float]] = {}
        self._engine_of: OrderedDict[bytes, str] = OrderedDict()
        self._seen_ms: dict[str, float] = {}

    def assign(self, tiers_of: Mapping[str, frozenset[str]]) -> None:
        """Which tiers' requests are promised their targets on which engines, from now on.

        Args:
            tiers_of: names of tiers by engine; an engine that is not in it takes all. Work without a promise, and what
                has been placed, is where there is room.

        Raises:
            ValueError: there is no such engine.
        """
        unknown = sorted(tiers_of.keys() - self._tp_of.keys())
        if unknown:
            known = ", ".join(self._tp_of)
            raise ValueError(f"there is no engine {', '.join(unknown)} to assign tiers to; there are {known}")
        self._tiers_of = dict(tiers_of)

    def of(self, engines: Sequence[Engine], prompt: Beginnings = ()) -> list[Load]:
        """The load of each engine, for a request whose prompt begins so."""
        now = self._clock_ms()
        times = {tp: Corrected(times, self.corrections[tp]) for tp, times in self._times.items()}
        expected = self._expected()
        for_all = _guard_ms(expected, None)
        loads = []
        for name in (engine.name for engine in engines):
            sums, tiers, tp = self.tally.of(name), self._tiers_of.get(name), self._tp_of[name]
            loads.append(
                Load(
                    name,
                    times[tp],
                    sums.requests,
                    sums.unread,
                    float(sums.context),
                    sums.tightest_tpot_ms,
                    self._prefill_ms(name, now),
                    self.bounds[tp],
                    self._cached(name, prompt) if prompt else 0,
                    for_all if tiers is None else _guard_ms(expected, tiers),
                    sums.decoding,
                    sums.preemptible,
                    tiers,
                )
            )
        return loads

    def placed(self, engine: Engine, tokens: int, prompt: Beginnings) -> float:
        """A request with a prompt of `tokens` tokens was sent to an engine, and is in the tally; returns the forecast
        of its first token, in ms from now."""
        name, now = engine.name, self._clock_ms()
        load = self.of([engine], prompt)[0]
        cached, times = load.cached, load.times
        # Of itself, the load has one request and its prompt.
        step = times.decode_ms(load.requests - 1, load.context - tokens)
        chunk = chunk_tokens(times, step, load.tightest_tpot_ms, load.bounds)
        between = step if load.decoding else 0.0
        own = times.prefill_ms(max(1, tokens - cached), cached)
        self._prefill[name] = (self._prefill_ms(name, now) + own, now)
        for _, key in prompt:
            self._engine_of[key] = name
            self._engine_of.move_to_end(key)
        while len(self._engine_of) > _REMEMBERED:
            self._engine_of.popitem(last=False)
        return step + prompts_ms(times, max(1, load.prefill_tokens - cached), cached, between, chunk)

    def seen(self, tier: str) -> None:
        """A request with targets has come."""
        self._seen_ms[tier] = self._clock_ms()

    def step_ms(self, engine: Engine) -> float:
        """Time between tokens on an engine, as it is now."""
        load = self.of([engine])[0]
        if not load.requests:
            return 0.0
        return forecast(Job(0, 0.0, None, None), replace(load, requests=load.requests - 1)).tpot_ms

    def learn(self, engine: str, what: Literal["prefill", "decode"], predicted_ms: float, actual_ms: float) -> None:
        """An engine has taken so long for what was predicted."""
        tp = self._tp_of[engine]
        known = self.corrections[tp]
        learned = known.with_prefill if what == "prefill" else known.with_decode
        self.corrections[tp] = learned(predicted_ms, actual_ms)

    def spare_ms(self) -> float:
        """Prompts without a promise that may be before the next one with a promise; infinite if none is expected."""
        targets = (tier.ttft_ms for tier in self._expected())
        return _SPARE_OF_TTFT * min((target for target in targets if target is not None), default=math.inf)

    def _expected(self) -> list[Tier]:
        """Tiers that had requests with targets within `_EXPECTED_MS`, and so are expected to have more."""
        now = self._clock_ms()
        self._seen_ms = {tier: at for tier, at in self._seen_ms.items() if now - at < _EXPECTED_MS}
        return [tier for tier in self._tiers() if tier.name in self._seen_ms]

    def _prefill_ms(self, engine: str, now: float) -> float:
        value, at = self._prefill.get(engine, (0.0, now))
        return value * math.exp((at - now) / WINDOW_MS)

    def _cached(self, engine: str, prompt: Beginnings) -> int:
        """Tokens of a prompt that an engine is believed to have."""
        return next((length for length, key in prompt if self._engine_of.get(key) == engine), 0)


def _guard_ms(expected: Sequence[Tier], tiers: frozenset[str] | None) -> float:
    """The smallest TPOT target of tiers that are expected; targets of single requests do not count."""
    targets = (tier.tpot_ms for tier in expected if tiers is None or tier.name in tiers)
    return min((target for target in targets if target is not None), default=math.inf)


def beginnings(ids: bytes) -> Beginnings:
    """Of a prompt, by its token ids, int64 each."""
    lengths = (length for length in _BEGINNINGS if len(ids) >= 8 * length)
    return tuple((length, blake2b(ids[: 8 * length], digest_size=16).digest()) for length in lengths)
