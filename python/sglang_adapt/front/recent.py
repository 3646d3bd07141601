"""How requests of each tier have fared in the last minutes, for the live page. Pure data; the clock is given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_adapt.core.messages import RequestReport
from sglang_adapt.core.slo import Terms, Tier

BIN_S = 5.0
BINS = 60
"""Bins of `BIN_S` seconds that are kept: five minutes."""
_RATE_BINS = 12
"""Bins of which the goodput is the mean: one minute."""


@dataclass(slots=True)
class Bin:
    """Requests that ended or were refused in one bin.

    Attributes:
        number: of the bin, counted from the clock's beginning.
        sent: all of them.
        met: those that met both targets.
        refused: with a 429.
    """

    number: int
    sent: int = 0
    met: int = 0
    refused: int = 0


class Recent:
    """Counts by tier and bin.

    Args:
        clock_s: a clock that never goes back, in s.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._bins: dict[str, deque[Bin]] = {}

    def ended(self, report: RequestReport) -> None:
        """A request that was admitted has ended."""
        current = self._bin(report.terms.tier)
        current.sent += 1
        current.met += all(report.met)

    def refused(self, terms: Terms) -> None:
        """A request was refused with a 429."""
        current = self._bin(terms.tier)
        current.sent += 1
        current.refused += 1

    def _bin(self, tier: str) -> Bin:
        number = int(self._clock_s() // BIN_S)
        bins = self._bins.setdefault(tier, deque(maxlen=BINS))
        if not bins or bins[-1].number != number:
            bins.append(Bin(number))
        return bins[-1]

    def told(self, tiers: Iterable[Tier]) -> list[dict[str, Any]]:
        """A row for each tier.

        Returns:
            `name` and targets; `goodput_rps` of the last minute; of all five minutes `sent`, `met`, `refused`, and
            `attainment`, None if nothing was sent; `sent_rps` and `met_rps`: of each bin, the oldest first, without the
            one that is not over yet.
        """
        now = int(self._clock_s() // BIN_S)
        return [self._row(tier, now) for tier in tiers]

    def _row(self, tier: Tier, now: int) -> dict[str, Any]:
        by_number = {entry.number: entry for entry in self._bins.get(tier.name, ()) if entry.number > now - BINS}
        past = [by_number.get(number, Bin(number)) for number in range(now - BINS + 1, now)]
        sent = sum(entry.sent for entry in by_number.values())
        met = sum(entry.met for entry in by_number.values())
        return {
            "name": tier.name,
            "ttft_ms": tier.ttft_ms,
            "tpot_ms": tier.tpot_ms,
            "background": tier.background,
            "goodput_rps": round(sum(entry.met for entry in past[-_RATE_BINS:]) / (_RATE_BINS * BIN_S), 2),
            "sent": sent,
            "met": met,
            "refused": sum(entry.refused for entry in by_number.values()),
            "attainment": round(met / sent, 4) if sent else None,
            "sent_rps": [round(entry.sent / BIN_S, 2) for entry in past],
            "met_rps": [round(entry.met / BIN_S, 2) for entry in past],
        }
