"""On which engines looser work leaves room for a tier with a tight target, and on which it need not.

Where there are several engines, a tier has its share of them to itself, as it were: as much as it asks for, by weight.
On the others looser work may go up to what has been promised there. If all engines left room, a load of which each
step is near the tight target would find none anywhere, although one engine could carry most of the looser work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """A tier that is to be expected.

    Attributes:
        tier: its name.
        tpot_ms: its target.
        share: how much it asks for, its weight times its requests; of any unit, the same for all.
    """

    tier: str
    tpot_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Place:
    """An engine: its name, the time of a step of one request, and the tiers promised there (None: all)."""

    engine: str
    alone_ms: float
    tiers: frozenset[str] | None = None


def guards(places: Sequence[Place], asked: Collection[Asked]) -> dict[str, float]:
    """By engine, the smallest TPOT target in ms for which looser work leaves room; infinite if there is none.

    The quickest engines leave room, of equal ones the first; at least one for each tier. Its share is rounded to whole
    engines: of two, one is left to looser work that asks for a quarter or more.
    """
    found = dict.fromkeys((place.engine for place in places), math.inf)
    whole = sum(one.share for one in asked)
    for one in asked:
        mine = [place for place in places if place.tiers is None or one.tier in place.tiers]
        looser = sum(other.share for other in asked if other.tpot_ms > one.tpot_ms)
        left = math.floor(len(mine) * looser / whole + 0.5) if whole > 0 else 0
        mine.sort(key=lambda place: place.alone_ms)
        for place in mine[: max(1, len(mine) - left)]:
            found[place.engine] = min(found[place.engine], one.tpot_ms)
    return found
