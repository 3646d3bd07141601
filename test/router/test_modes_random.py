"""Random requests, aborts, deaths and switches with faults in any phase: each request ends once, no block is lost."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers import io_struct
from switch_fakes import FAULTS, ONES, SPECS, TWO, Node

from sglang_adapt.router.switch import SwitchRefusedError

CALLS = (
    "UnexportableCall",
    "SnapshotCall",
    "PrecopyCall",
    "ExportCall",
    "AdoptCall",
    "ReleaseCall",
    "RestoreCall",
    "kv_map",
    "kv_grow",
)
places = st.tuples(st.sampled_from(sorted(SPECS)), st.sampled_from(CALLS))
steps = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 400)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("die"), st.sampled_from(sorted(SPECS))),
    st.tuples(st.just("fault"), st.tuples(places, st.sampled_from(FAULTS))),
    st.tuples(st.just("turns"), st.tuples(places, st.integers(0, 12))),
    st.tuples(st.just("meanwhile"), st.tuples(places, st.sampled_from(("request", "abort", "finish", "die")))),
    st.tuples(
        st.just("switch"),
        st.tuples(st.sampled_from((ONES, TWO)), st.sampled_from(("auto", "migrate", "recompute", "keep", "drain"))),
    ),
)


class Story:
    """A node, and what happens to it."""

    def __init__(self) -> None:
        self.node = Node(drain_timeout_s=0.01)

    def rid(self, number: int) -> str:
        return f"r{number:03d}"

    def request(self, tokens: int) -> None:
        """One in four may come to have all that an engine of TP 1 holds, so that nothing stays kept beside it."""
        self.node.request(self.rid(len(self.node.sent)), tokens=tokens, new=None if tokens > 300 else 4)

    def finish(self, number: int) -> None:
        self.node.finish(self.rid(number))

    def abort(self, number: int) -> None:
        self.node.world.send(io_struct.AbortReq(rid=self.rid(number)))
        self.node.read()

    def meanwhile(self, place: tuple[str, str], what: str) -> None:
        acts = {
            "request": lambda: self.request(30),
            "abort": lambda: self.abort(0),
            "finish": lambda: self.node.finish(),
            "die": lambda: self.node.die(place[0]),
        }
        self.node.during[place] = acts[what]

    async def step(self, kind: str, value: object) -> None:
        node = self.node
        match kind, value:
            case "die", str(name):
                node.die(name)
            case "fault", (place, fault):
                node.faults[place] = fault
            case "turns", (place, turns):
                node.turns[place] = turns
            case "meanwhile", (place, what):
                self.meanwhile(place, what)
            case "switch", (layout, strategy):
                with contextlib.suppress(SwitchRefusedError, ZeroDivisionError):
                    await node.switch(layout, strategy)
                await node.settle()
                node.check()
            case _:
                getattr(self, kind)(value)

    async def end(self) -> None:
        """Without further faults everything ends."""
        node = self.node
        node.faults, node.during, node.turns = {}, {}, {}
        await node.settle()
        for layout in (TWO, ONES):
            with contextlib.suppress(SwitchRefusedError):
                await node.switch(layout, "recompute")
            await node.settle()
        node.finish()
        await node.settle()
        node.check()
        assert node.router.in_flight == 0
        assert set(node.ended()) == node.sent


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=3, max_size=25))
@example([("request", 1), ("die", "tp1@0"), ("finish", 0)])
@example([("request", 9), ("switch", (TWO, "keep")), ("request", 301), ("switch", (ONES, "keep")), ("request", 301)])
@example([("die", "tp1@0"), ("fault", (("tp1@0", "kv_grow"), "raise")), ("switch", (ONES, "auto"))])
@example([("die", "tp1@0"), ("fault", (("tp1@0", "kv_grow"), "refuse")), ("switch", (ONES, "auto"))])
def test_anything_in_any_order(story: list[tuple[str, object]]) -> None:
    async def tell() -> None:
        told = Story()
        for kind, value in story:
            await told.step(kind, value)
        await told.end()

    asyncio.run(tell())
