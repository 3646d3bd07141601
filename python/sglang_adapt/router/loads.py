"""What engines have to do, as `policy.admission` asks for it: sums of requests, prompts of late, times as corrected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sglang_adapt.policy.admission import WINDOW_MS, Load
from sglang_adapt.policy.limits import Bounds
from sglang_adapt.policy.profile import Corrected, Correction, Times
from sglang_adapt.policy.reserve import Guard
from sglang_adapt.policy.tally import Tally
from sglang_adapt.router.decaying import Decaying
from sglang_adapt.router.prefixes import Prefix, Prefixes

_OPEN = Guard()


class Loads:
    """See the module.

    Args:
        tally: what engines have been given and have not ended.
        tp_of: TP size of every engine, by name.
        times: by TP size, without corrections.
        corrections: by TP size; the present ones count, so whoever learns changes this mapping.
        bounds: of an engine's iterations, by TP size.
        clock_ms: the time.
    """

    def __init__(
        self,
        tally: Tally,
        tp_of: Mapping[str, int],
        times: Mapping[int, Times],
        corrections: Mapping[int, Correction],
        bounds: Mapping[int, Bounds],
        clock_ms: Callable[[], float],
    ) -> None:
        self._tally = tally
        self._tp_of = tp_of
        self._times = times
        self._corrections = corrections
        self._bounds = bounds
        self._clock_ms = clock_ms
        self.tiers_of: Mapping[str, frozenset[str]] = {}
        self.prefixes = Prefixes()
        self._prefill: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(WINDOW_MS))

    def of(
        self,
        engines: Sequence[str],
        prefixes: Sequence[Prefix] = (),
        guards: Mapping[str, Guard] | None = None,
        waits_ms: float = 0.0,
    ) -> list[Load]:
        """The loads of engines, by name.

        Args:
            engines: their names.
            prefixes: of the prompt that is to be placed.
            guards: what looser work keeps to; None: nothing is to be placed.
            waits_ms: loosest TPOT target of work that waits for room; 0 if none does.
        """
        now = self._clock_ms()
        times = {tp: Corrected(plain, self._corrections[tp]) for tp, plain in self._times.items()}
        guards = {} if guards is None else guards
        return [self._load(name, times[self._tp_of[name]], now, prefixes, guards, waits_ms) for name in engines]

    def _load(
        self,
        name: str,
        times: Times,
        now: float,
        prefixes: Sequence[Prefix],
        guards: Mapping[str, Guard],
        waits_ms: float,
    ) -> Load:
        sums = self._tally.of(name)
        return Load(
            name,
            times,
            sums.requests,
            sums.unread,
            float(sums.context),
            sums.tightest_tpot_ms,
            self._prefill[name].at(now),
            self._bounds[self._tp_of[name]],
            self.prefixes.cached(name, prefixes) if prefixes else 0,
            guards.get(name, _OPEN),
            sums.decoding,
            sums.preemptible,
            self.tiers_of.get(name),
            waits_ms=waits_ms,
        )

    def sent(self, engine: str, prefill_ms: float) -> None:
        """Prompts of late of an engine come to so much from now on, with one that was sent to it just now."""
        self._prefill[engine].put(prefill_ms, self._clock_ms())
