"""What holders of requests have to do, added up as requests come, go on and leave, so that no one has to count them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """What one request adds to its holder.

    Attributes:
        prompt: tokens of its prompt.
        output: tokens that it has given.
        unread: its first token has not come, and so its prompt may have to be computed.
        decoding: its first token has come. Neither, if nothing is known of it.
        preemptible: it gives way to one with targets.
        promised: its targets have been promised.
        tpot_ms: what it was promised; None if nothing, or no such target.
        aged: it was sent because it had waited its time.
    """

    prompt: int
    output: int = 0
    unread: bool = False
    decoding: bool = False
    preemptible: bool = False
    promised: bool = False
    tpot_ms: float | None = None
    aged: bool = False


@dataclass(slots=True)
class Sums:
    """Of one holder: counts of requests, and tokens of prompts (`unread`) and of prompts and outputs (`context`)."""

    requests: int = 0
    unread: int = 0
    context: int = 0
    decoding: int = 0
    preemptible: int = 0
    promised: int = 0
    aged: int = 0
    _tpots: list[float] = field(default_factory=list)

    @property
    def tightest_tpot_ms(self) -> float:
        """The smallest that was promised; infinite if there is none."""
        return self._tpots[0] if self._tpots else math.inf

    def add(self, part: Part) -> None:
        self._count(part, 1)
        if part.tpot_ms is not None:
            insort(self._tpots, part.tpot_ms)

    def take(self, part: Part) -> None:
        """The contrary of `add`, of a part that was added."""
        self._count(part, -1)
        if part.tpot_ms is not None:
            del self._tpots[bisect_left(self._tpots, part.tpot_ms)]

    def _count(self, part: Part, sign: int) -> None:
        self.requests += sign
        self.unread += sign * part.prompt * part.unread
        self.context += sign * (part.prompt + part.output)
        self.decoding += sign * part.decoding
        self.preemptible += sign * part.preemptible
        self.promised += sign * part.promised
        self.aged += sign * part.aged


_NOTHING = Sums()


class Tally:
    """The sums of all holders. A request has one holder at most."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, tuple[str, Part]] = {}
        self._sums: dict[str, Sums] = {}

    def of(self, holder: str) -> Sums:
        """What a holder has; not to be changed."""
        return self._sums.get(holder, _NOTHING)

    def put(self, key: Hashable, holder: str, part: Part) -> None:
        """A request is a holder's from now on, wherever it was, and adds this to it."""
        self.drop(key)
        self._parts[key] = (holder, part)
        self._sums.setdefault(holder, Sums()).add(part)

    def change(self, key: Hashable, part: Part) -> None:
        """A request adds something else to its holder now; one that has no holder adds to none."""
        if (known := self._parts.get(key)) is not None:
            self.put(key, known[0], part)

    def grow(self, holder: str, tokens: int) -> None:
        """A holder's requests have so many tokens more together, of which their parts do not tell yet.

        Who says so takes them back, as less than 0, when parts tell of them.
        """
        sums = self._sums.get(holder)
        if sums is not None:
            sums.context += tokens

    def drop(self, key: Hashable) -> None:
        """A request is nobody's any more, if it was anybody's."""
        known = self._parts.pop(key, None)
        if known is not None:
            holder, part = known
            sums = self._sums[holder]
            sums.take(part)
            if not sums.requests:
                del self._sums[holder]
