"""Decisions about roles: who has which now, and where a request that has its first token goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_adapt.core.layout import Role


def roles_now(roles: Mapping[str, Role], up: Collection[str]) -> dict[str, Role]:
    """What each engine of a layout does now: its role, but that all are mixed while one of the two kinds is missing.

    Args:
        roles: by engine, as the layout has them.
        up: the engines that serve.
    """
    there = [roles[name] for name in roles if name in up]
    reads = any(role is not Role.DECODE for role in there)
    decodes = any(role is not Role.PREFILL for role in there)
    return dict(roles) if (reads and decodes) or not there else dict.fromkeys(roles, Role.MIXED)


@dataclass(frozen=True, slots=True)
class Taker:
    """An engine that may take a request over.

    Attributes:
        name: of the engine.
        page: tokens of one of its blocks.
        leased: its blocks on each rank.
        held: tokens of the requests that it has, prompt and output, and of those on their way to it.
        requests: how many these are.
    """

    name: str
    page: int
    leased: int
    held: int
    requests: int

    @property
    def free(self) -> int:
        """Blocks that are free on each rank, about: each request has begun one more, and may soon need another."""
        return self.leased - self.held // self.page - 2 * self.requests

    def after(self, tokens: int) -> Taker:
        """The same when a request with `tokens` tokens has come."""
        return Taker(self.name, self.page, self.leased, self.held + tokens, self.requests + 1)


def choose_taker(takers: Sequence[Taker], tokens: int, within: Collection[str]) -> Taker | None:
    """Who takes a request of `tokens` tokens over; None if no engine has room.

    Args:
        takers: engines that may.
        tokens: of the request.
        within: names of those where no target suffers. They go first, but elsewhere a target is missed by less than
            where prompts are read.
    """
    return _with_most_room([taker for taker in takers if taker.name in within], tokens) or _with_most_room(
        takers, tokens
    )


@dataclass(frozen=True, slots=True)
class Rooms:
    """The engines that may take requests over, by name, while these are placed one after the other.

    Attributes:
        beside: their room beside what goes ahead of prompts that are still being read.
        pressed: the same engines without that: it makes way where nobody else has room.
    """

    beside: Mapping[str, Taker] = field(default_factory=dict)
    pressed: Mapping[str, Taker] = field(default_factory=dict)

    def choose(self, tokens: int, holding: Collection[str], within: Collection[str]) -> str | None:
        """Who takes over a request of `tokens` tokens that has been read; None if no engine has room.

        Args:
            tokens: of the request.
            holding: the engines that hold all that it may come to have.
            within: as for `choose_taker`.
        """
        for takers in (self.beside, self.pressed):
            taker = choose_taker([taker for name, taker in takers.items() if name in holding], tokens, within)
            if taker is not None:
                return taker.name
        return None

    def after(self, name: str, tokens: int, *, ahead: bool) -> Rooms:
        """The same when a request has come to an engine, which may be one that is not here; `ahead`: parts of it went
        there before, so that it is counted in `beside` already."""
        return Rooms(self.beside if ahead else _after(self.beside, name, tokens), _after(self.pressed, name, tokens))


def _after(takers: Mapping[str, Taker], name: str, tokens: int) -> Mapping[str, Taker]:
    return takers if name not in takers else {**takers, name: takers[name].after(tokens)}


def _with_most_room(takers: Sequence[Taker], tokens: int) -> Taker | None:
    """The engine with the most room, in tokens; None if none has enough."""
    best = max(takers, key=lambda taker: (taker.free * taker.page, -taker.requests), default=None)
    return None if best is None or best.free < -(-tokens // best.page) + 2 else best
