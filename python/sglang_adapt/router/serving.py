"""Which engines there are, which of them serve, in which role, and which one gets the next request."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.policy.dispatch import LeastLoaded
from sglang_adapt.policy.roles import roles_now
from sglang_adapt.router.engine import Engine, EngineState
from sglang_adapt.router.long_requests import LongRequests, readers

logger = logging.getLogger(__name__)

_MAY_SERVE = (EngineState.STARTING, EngineState.READY, EngineState.DEAD)


class Serving:
    """See the module. Where requests are is the router's to know (`router.py`).

    Args:
        layout: that serves.
        long: which engine holds which request.

    Attributes:
        layout: that serves.
        engines: all, by name.
        roles: what the engines of the layout do now. New requests go to those that are not `decode`.
        active: names of the engines of the layout.
        readers: of those that read prompts by their role in it.
        paused: a switch has taken its engines out of dispatch.
    """

    def __init__(self, layout: Layout, long: LongRequests) -> None:
        self.engines: dict[str, Engine] = {}
        self.paused = False
        self._long = long
        self._dispatch: LeastLoaded[str] = LeastLoaded()
        self._take(layout)
        self.roles = _named_roles(layout)

    def _take(self, layout: Layout) -> None:
        self.layout = layout
        self.active = {spec.name for spec in layout.engines}
        self.readers = readers(layout)

    # Engines and layouts come and go.

    def engine_ready(self, engine: Engine) -> None:
        """An engine has answered its warm-up request: dispatch to it if it is in the layout."""
        engine.state = EngineState.READY
        self._set_roles()
        if engine.name in self.active and engine.name not in self._dispatch and self._reads(engine.name):
            self._dispatch.add(engine.name)

    def engine_lost(self, engine: Engine, state: EngineState) -> None:
        """An engine gets no more requests."""
        engine.state = state
        self._leave_dispatch([engine.name])
        self._set_roles()

    def pause(self, engines: Iterable[str]) -> None:
        """These engines get no more requests until `activate`."""
        self.paused = True
        self._leave_dispatch(engines)

    def activate(self, layout: Layout) -> None:
        """The engines of a layout get requests from now on."""
        self._take(layout)
        self.paused = False
        self._set_roles()
        for name, engine in self.engines.items():
            if name not in self.active or not self._reads(name):
                self._leave_dispatch([name])
            elif engine.state is EngineState.READY and name not in self._dispatch:
                self._join_dispatch(engine)

    def _set_roles(self) -> None:
        """An engine has come or gone, or the layout is another one: who does what, and who gets new requests."""
        up = {name for name in self.active if self.is_ready(name)}
        before, self.roles = self.roles, roles_now(_named_roles(self.layout), up)
        if self.roles != before:
            logger.info("roles: %s", ", ".join(f"{name} {role}" for name, role in self.roles.items()))
        if self.paused or not self.layout.roles:
            return
        for name in self.active:
            if not self._reads(name):
                self._leave_dispatch([name])
            elif name in up and name not in self._dispatch:
                self._join_dispatch(self.engines[name])

    def _leave_dispatch(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._dispatch:
                self._dispatch.remove(name)

    def _join_dispatch(self, engine: Engine) -> None:
        self._dispatch.add(engine.name, len(engine.in_flight), sum(engine.unread.values()))

    def _reads(self, name: str) -> bool:
        """Does an engine of the layout get new requests?"""
        return self.roles.get(name) is not Role.DECODE

    def roles_of_those_up(self) -> dict[str, Role]:
        """What engines do now that are ready, by name; nothing if all of the layout are mixed."""
        if not self.layout.roles or all(role is Role.MIXED for role in self.roles.values()):
            return {}
        return {name: role for name, role in self.roles.items() if self.is_ready(name)}

    # Requests come and go.

    def assign(self, name: str, unread: int) -> None:
        """An engine has got a request, with so many prompt tokens to read; what is not in dispatch is not counted."""
        if name in self._dispatch:
            self._dispatch.assign(name, unread)

    def read(self, name: str, tokens: int) -> None:
        """An engine has read a prompt of so many tokens."""
        self._dispatch.read(name, tokens)

    def release(self, name: str, unread: int) -> None:
        """A request has left an engine, with so many prompt tokens that were not read."""
        self._dispatch.release(name, unread)

    # Who.

    def get_requests(self) -> list[Engine]:
        """The engines that get requests now."""
        return [engine for name, engine in self.engines.items() if name in self._dispatch]

    def is_ready(self, name: str) -> bool:
        return name in self.engines and self.engines[name].state is EngineState.READY

    def may_serve(self) -> bool:
        """Is an engine of the layout up, or will one be?"""
        return any(self.engines[name].state in _MAY_SERVE for name in self.active)

    def alive(self) -> list[str]:
        """Engines that serve, or can come to; all if none can."""
        return [name for name, engine in self.engines.items() if engine.state in _MAY_SERVE] or list(self.engines)

    def may_hold(self, rid: str, *, waits: bool) -> bool:
        """Is a request one that every engine holds, or one that an engine holds which serves, or can come to?

        Args:
            rid: its id.
            waits: it may wait for an engine outside the layout.
        """
        if rid not in self._long.needs:
            return True
        names = self.engines if waits else self.active
        return self._long.held_by_one((name for name in names if self.engines[name].state in _MAY_SERVE), rid)

    def may_take(self, rid: str, *, accepted: bool) -> bool:
        """Has the layout an engine that holds a request, up or not; `accepted` as in `engine_for`."""
        return self._long.held_by_one(self.active if accepted else self.readers, rid)

    def sends_to(self, name: str) -> bool:
        """May this engine get the next request, from a client or from an engine that has prefilled it?"""
        takes_over = self.roles.get(name) is Role.DECODE and self.is_ready(name) and not self.paused
        return name in self._dispatch or takes_over

    def engine_for(self, rid: str, wanted: str | None = None, *, accepted: bool = True) -> Engine | None:
        """The engine that gets a request, if there is one.

        Args:
            rid: its id.
            wanted: it is this engine, if it holds the request; else the one with the least load that does.
            accepted: it has been accepted, so that one which no engine holds that reads prompts goes to one that only
                decodes.
        """
        if wanted is not None and wanted in self._dispatch and self._long.holds(wanted, rid):
            return self.engines[wanted]
        if rid not in self._long.needs:
            name = self._dispatch.least()
            return None if name is None else self.engines[name]
        holding = [engine for engine in self.get_requests() if self._long.holds(engine.name, rid)]
        if not holding and accepted and not self._long.held_by_one(self.readers, rid):
            taking = [name for name in self.active if self.sends_to(name) and self._long.holds(name, rid)]
            return min((self.engines[name] for name in taking), key=lambda engine: len(engine.in_flight), default=None)
        return min(holding, key=lambda engine: self._dispatch.load(engine.name), default=None)


def _named_roles(layout: Layout) -> dict[str, Role]:
    return {spec.name: role for spec, role in layout.role_of.items()}
