"""Roles in simulated time: who reads prompts hands requests over when they have their first token.

As the router's (`router/handovers.py`), with its choice of the taker, but a request that finds no room is decoded where
it was read at once.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_adapt.core.layout import Layout, Role
from sglang_adapt.policy.roles import Taker, choose_taker
from sglang_adapt.simulate.engine import Request, SimulatedEngine
from sglang_adapt.simulate.hardware import Hardware
from sglang_adapt.simulate.node import Node

HANDOVER_MS = 6.5
"""What a hand-over takes, as measured on 2 H200 with nothing beside (`bench_roles_2xH200.json`)."""


class HandingOver:
    """See the module.

    Args:
        node: whose engines these are; its routing is in use, and knows the roles.
        hardware: what engines can do.
        took: told the time of each hand-over, in ms.

    Attributes:
        handed_over: requests so far.
        until_ms: when all that are under way have arrived.
    """

    def __init__(self, node: Node, hardware: Hardware, took: Callable[[float], None] = lambda ms: None) -> None:
        self._node = node
        self._hardware = hardware
        self._took = took
        self._readers: set[str] = set()
        self._takers: list[SimulatedEngine] = []
        self.handed_over = 0
        self.until_ms = 0.0

    def use(self, layout: Layout) -> None:
        """The layout that serves has these roles from now on."""
        self._readers = {one.name for one, role in layout.role_of.items() if role is Role.PREFILL}
        self._takers = [self._node.engines[one.name] for one, role in layout.role_of.items() if role is Role.DECODE]

    def rest(self) -> None:
        """Nothing is handed over, as while the layout changes; what is under way arrives."""
        self._readers, self._takers = set(), []

    def first_token(self, request: Request, engine: SimulatedEngine) -> None:
        """Hand a request over, if its engine only reads and another one has room."""
        if engine.name not in self._readers:
            return
        takers = [self._taker(one) for one in self._takers]
        tokens = request.arrival.prompt + request.arrival.output
        within = self._node.routing.decode_within(request, [taker.name for taker in takers])
        chosen = choose_taker(takers, tokens, within)
        if chosen is None:
            return
        taker = self._node.engines[chosen.name]
        taker.expect(request)
        engine.hand_over(request)
        self._node.routing.left(engine, [request])
        self.handed_over += 1
        copy_ms = 1e3 * request.arrival.prompt * self._hardware.token_bytes / self._hardware.price.bytes_per_s
        arrives = self._node.now_ms + HANDOVER_MS + copy_ms
        self.until_ms = max(self.until_ms, arrives)
        self._took(HANDOVER_MS + copy_ms)
        self._node.at(arrives, lambda: self._arrived(request, taker))

    def _taker(self, engine: SimulatedEngine) -> Taker:
        page = engine.bounds.page_tokens
        held = engine.kv_tokens - engine.free_tokens
        return Taker(engine.name, page, engine.kv_tokens // page, held, len(engine.requests))

    def _arrived(self, request: Request, taker: SimulatedEngine) -> None:
        self._node.routing.handed_over(request, taker.name)
        taker.resume(request, self._node.now_ms)
        self._node.schedule(taker)
