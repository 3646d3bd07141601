"""On which engines looser work leaves room for a tier with a tight target, and on which it need not.

Where there are several engines, a tier has its share of them to itself, as it were: as much as it asks for, by weight.
On the others looser work may go up to what has been promised there. If all engines left room, a load of which each
step is near the tight target would find none anywhere, although one engine could carry most of the looser work.

Where all engines are the tight tier's, looser work that leaves room has nowhere else to go: a request of one tier is
only turned away for a later one of another, and what is left may stay empty. So it leaves none there, but binds itself
to the tight target: the next request of either tier finds the same. It can wait longer for it, though, and is
harmed less by what was foreseen too low, so where the tight tier fares worse for its weight, room is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sglang_adapt.policy.limits import SAFETY

FILL = 0.75
"""Looser work may bring an engine to this part of a target that is to be expected, or of what the target leaves beside
one request's step, whichever is more."""
NO_ROOM = SAFETY
"""The same where it leaves no room: as far as the tight tier itself."""
WELL = 0.95
"""A tier of whose requests so many are in time needs no room."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A tier that is to be expected.

    Attributes:
        tier: its name.
        tpot_ms: its target.
        share: how much it asks for, its weight times its requests; of any unit, the same for all.
        weight: of the tier.
        kept: of its requests of late, the part that was promised its targets and had them.
    """

    tier: str
    tpot_ms: float
    share: float
    weight: float = 1.0
    kept: float = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """An engine: its name, the time of a step of one request, and the tiers promised there (None: all)."""

    engine: str
    alone_ms: float
    tiers: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """What looser work keeps to on an engine.

    Attributes:
        tpot_ms: smallest target of a tier that is to be expected there; infinite if there is none.
        fill: the part of what that target leaves that looser work may use.
    """

    tpot_ms: float = math.inf
    fill: float = FILL


def guards(places: Sequence[Place], asked: Collection[Asked]) -> dict[str, Guard]:
    """By engine, the smallest TPOT target that looser work keeps to, and how much room it leaves.

    The quickest engines leave room, of equal ones the first; at least one for each tier. Its share is rounded to whole
    engines: of two, one is left to looser work that asks for a quarter or more.
    """
    found = dict.fromkeys((place.engine for place in places), Guard())
    whole = sum(one.share for one in asked)
    for one in asked:
        mine = [place for place in places if place.tiers is None or one.tier in place.tiers]
        looser = sum(other.share for other in asked if other.tpot_ms > one.tpot_ms)
        left = open_ones(len(mine), looser, whole)
        mine.sort(key=lambda place: place.alone_ms)
        guard = Guard(one.tpot_ms, FILL if left > 0 or _fares_worse(one, asked) else NO_ROOM)
        for place in mine[: len(mine) - left]:
            found[place.engine] = min(found[place.engine], guard, key=lambda guard: guard.tpot_ms)
    return found


def open_ones(engines: int, looser: float, whole: float) -> int:
    """Of a tier's engines, those that looser work has to itself: its share of what is asked for, but not all."""
    return min(engines - 1, math.floor(engines * looser / whole + 0.5)) if engines and whole > 0 else 0


def _fares_worse(tier: Asked, asked: Collection[Asked]) -> bool:
    """Is less of a tier's requests in time than its weight asks for, beside a looser one?"""
    looser = [other for other in asked if other.tpot_ms > tier.tpot_ms]
    return tier.kept < WELL and any(tier.kept * other.weight < other.kept * tier.weight for other in looser)
