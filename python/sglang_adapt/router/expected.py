"""Tiers that are to be expected, by what was asked for of late, and the room that is left for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sglang_adapt.core.slo import SloConfig, Terms, Tier
from sglang_adapt.policy.reserve import Asked, Guard, Place, guards
from sglang_adapt.router.decaying import Decaying
from sglang_adapt.router.fared import Fared

_EXPECTED_MS = 10_000.0
"""A tier that has had a request in this time is expected to have another one, for which room is left."""
_RESERVE_MS = 200.0
"""So often is decided anew which engines leave room for a tight tier."""
_QUIET_MS, _QUIET_GAPS = 1_000.0, 5.0
"""Nothing comes any more if nothing has for so long, and for so many times as long as between requests before."""
_SPARE_OF_TTFT = 0.5
"""Work without a promise may put prompts before the next feasible request for this part of the smallest TTFT target of
the tiers that are expected."""


class Expected:
    """See the module.

    Args:
        config: the tiers.
        alone_ms: a decode step of one request, by engine.
        clock_ms: the time.
    """

    def __init__(self, config: SloConfig, alone_ms: Callable[[str], float], clock_ms: Callable[[], float]) -> None:
        self._config = config
        self._alone_ms = alone_ms
        self._clock_ms = clock_ms
        self._tiers_of: Mapping[str, frozenset[str]] = {}
        self._seen_ms: dict[str, float] = {}
        self._asked: defaultdict[str, Decaying] = defaultdict(lambda: Decaying(_EXPECTED_MS))
        self.fared = Fared(clock_ms)
        self._guarding: tuple[float, tuple[str, ...], Mapping[str, Guard]] | None = None

    def use(self, config: SloConfig, tiers_of: Mapping[str, frozenset[str]]) -> None:
        """Other tiers, or other tiers promised on engines, from now on."""
        self._config, self._tiers_of, self._guarding = config, tiers_of, None

    def asked(self, terms: Terms) -> None:
        """A request has come. One that is refused counts as well: room is to be there for the next one."""
        now = self._clock_ms()
        self.fared.came(terms.tier)
        self._asked[terms.tier].add(1.0, now)
        if terms.tpot_ms is not None:
            if terms.tier not in self._seen_ms:
                self._guarding = None
            self._seen_ms[terms.tier] = now

    def spare_ms(self) -> float:
        """Prompts without a promise that may be before the next one with a promise; infinite if none is expected."""
        targets = (tier.ttft_ms for tier in self._expected())
        return _SPARE_OF_TTFT * min((target for target in targets if target is not None), default=math.inf)

    def is_quiet(self) -> bool:
        """Has a load ended: has no request with or without targets come for much longer than before?"""
        if not self._asked:
            return True
        last = max(asked.changed_ms for asked in self._asked.values())
        gap_ms = _EXPECTED_MS / sum(asked.at(last) for asked in self._asked.values())
        return self._clock_ms() - last > max(_QUIET_MS, _QUIET_GAPS * gap_ms)

    def guards(self, engines: Sequence[str]) -> Mapping[str, Guard]:
        """What looser work keeps to, by engine, of all that serve."""
        now, names = self._clock_ms(), tuple(engines)
        if self._guarding is not None:
            decided, of, known = self._guarding
            if of == names and now - decided < _RESERVE_MS:
                return known
        places = [Place(name, self._alone_ms(name), self._tiers_of.get(name)) for name in names]
        asked = [
            Asked(
                tier.name,
                tier.tpot_ms,
                tier.weight * self._asked[tier.name].at(now),
                tier.weight,
                self.fared.kept(tier.name),
            )
            for tier in self._expected()
            if tier.tpot_ms is not None
        ]
        found = guards(places, asked)
        self._guarding = (now, names, found)
        return found

    def _expected(self) -> list[Tier]:
        """Tiers that had requests with targets within `_EXPECTED_MS`, and so are expected to have more."""
        now = self._clock_ms()
        self._seen_ms = {tier: at for tier, at in self._seen_ms.items() if now - at < _EXPECTED_MS}
        return [tier for tier in self._config.tiers if tier.name in self._seen_ms]
