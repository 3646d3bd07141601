"""Requests that not every engine holds: how long each may become, which engines hold it, which of them wait for one.

An engine of a wide TP size holds longer requests than a narrow one (`kv/sizing.py`). Where the planner may bind a wide
engine for it, a request is accepted up to what the widest one holds, and waits here until the layout has one. Where
nobody may, the limit is what the layout holds that serves. Flying Serving, 2.3 and 5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from sglang_adapt.core.config import AdaptPolicy
from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.policy.lengths import MARGIN, fits, longest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lengths:
    """What limits the length of requests in a deployment.

    Attributes:
        limits: tokens of the longest request, prompt and output, by engine; empty where each engine decides that alone.
        policy: who may change the layout.
        truncates: engines cut a prompt that is too long (`--allow-auto-truncate`).
    """

    limits: Mapping[str, int]
    policy: AdaptPolicy = AdaptPolicy.MANUAL
    truncates: bool = False


@dataclass(frozen=True)
class _Waiting:
    tokens: int
    data: bytes


class LongRequests:
    """See the module.

    Args:
        lengths: of the deployment.
        clock_ms: a clock that never goes back.

    Attributes:
        may_bind: a wide engine is bound for a request that the layout does not hold.
        needs: tokens of every request that not all engines hold, by id, from its arrival to its end.
        patient: those of them that were paused, and wait for a layout that holds them, whoever makes it.
    """

    def __init__(self, lengths: Lengths, clock_ms: Callable[[], float]) -> None:
        self._lengths = lengths
        self._clock_ms = clock_ms
        self._limits = lengths.limits
        self._sizes = sorted(set(lengths.limits.values()))
        self.may_bind = lengths.policy is AdaptPolicy.AUTO
        self.needs: dict[str, int] = {}
        self.patient: set[str] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._arrived_ms: dict[str, float] = {}

    @property
    def matter(self) -> bool:
        """Is there a request that some engines hold and others do not?"""
        return len(self._sizes) > 1

    @property
    def waiting(self) -> Collection[str]:
        """Requests that wait for an engine that holds them."""
        return self._waiting.keys()

    def limit(self, engines: Iterable[str]) -> int:
        """The longest request that one of these engines holds, in tokens; 0 if there is none."""
        return max((self._limits[name] for name in engines if name in self._limits), default=0)

    def holds(self, name: str, rid: str) -> bool:
        """Does an engine hold a request?"""
        need = self.needs.get(rid)
        return need is None or self._limits[name] >= need

    def held_by_one(self, engines: Iterable[str], rid: str) -> bool:
        return any(self.holds(name, rid) for name in engines)

    # From arrival to end.

    def arrived(self, rid: str, prompt: int, asked: int | None, layout: Layout, alive: Collection[str]) -> str:
        """A request has come: note how long it may become.

        Args:
            rid: its id.
            prompt: its tokens.
            asked: the most output tokens that it asks for; None: as many as there is room for.
            layout: that serves.
            alive: all engines that serve or can be bound.

        Returns:
            Why it is refused; nothing if it is accepted.
        """
        limit = self.limit(alive if self.may_bind else readers(layout))
        if not fits(prompt, limit) and not self._lengths.truncates:
            return self._refusal(prompt, limit, layout, alive)
        need = min(limit, longest(prompt, asked, self._sizes))
        if need > self._sizes[0]:
            self.needs[rid] = need
            self._arrived_ms[rid] = self._clock_ms()
        return ""

    def _refusal(self, prompt: int, limit: int, layout: Layout, alive: Collection[str]) -> str:
        widest = max(alive, key=lambda name: self._limits[name], default="")
        text = f"Input length ({prompt} tokens) exceeds the maximum allowed length ({limit - MARGIN} tokens)"
        if self.may_bind:
            return f"{text}: {widest}, the widest engine, holds requests of {limit} tokens, prompt and output."
        which = ", whose engines that decode get no prompts," if Role.DECODE in layout.roles else ""
        text += f": layout {layout}{which} holds requests of {limit} tokens, prompt and output"
        if not widest or not fits(prompt, self._limits[widest]):
            return f"{text}, and no engine of this server holds this one."
        room = f"{widest} would hold {self._limits[widest]}"
        match self._lengths.policy:
            case AdaptPolicy.STATIC:
                way = "start the server with a layout with it (--adapt-layout), or with --adapt-policy auto"
            case AdaptPolicy.MANUAL:
                way = "switch to a layout with it (POST /adapt/layout), or start the server with --adapt-policy auto"
            case AdaptPolicy.AUTO:
                way = "let the planner decide again (POST /adapt/layout with auto), or switch to a layout with it"
        return f"{text}; {room}: {way}."

    def wait(self, rid: str, tokens: int, data: bytes) -> None:
        """No engine of the layout holds a request: it waits until `take`."""
        self._waiting[rid] = _Waiting(tokens, data)

    def take(self) -> list[tuple[str, int, bytes]]:
        """All that wait, as (id, tokens, message), in the order in which they came; none waits any more."""
        waiting, self._waiting = self._waiting, {}
        return [(rid, one.tokens, one.data) for rid, one in waiting.items()]

    def drop(self, rid: str) -> None:
        """A request waits no more."""
        del self._waiting[rid]

    def placed(self, rid: str, engine: str) -> None:
        """A request was sent to an engine; logged, the first time, with the time since it came."""
        arrived = self._arrived_ms.pop(rid, None)
        if arrived is not None:
            logger.info(
                "request %s of %d tokens: at %s %.1f ms after it came",
                rid,
                self.needs[rid],
                engine,
                self._clock_ms() - arrived,
            )

    def ended(self, rid: str) -> None:
        """A request is not there any more."""
        if self.needs.pop(rid, None) is not None:
            self._arrived_ms.pop(rid, None)
            self.patient.discard(rid)


def readers(layout: Layout) -> list[str]:
    """The engines of a layout that get prompts; a request has to fit into one of them."""
    return [spec.name for spec, role in layout.role_of.items() if role is not Role.DECODE]
