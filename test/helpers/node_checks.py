"""What holds of a node between switches, whatever has happened: requests, blocks and ledgers are accounted for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fake_engine import SETTINGS, SPECS

from sglang_adapt.router.engine import EngineState

if TYPE_CHECKING:
    from switch_fakes import Node


def check(node: Node) -> None:
    """Each request in one place, and every ledger as the engines have it."""
    node.pools.check()
    for name, spec in SPECS.items():
        if node.router.engines[name].state is EngineState.READY:
            assert node.pools.lease(spec) == [sorted(pages) for pages in node.fakes[name].lease], name
    if not node.modes.kept.exports:
        serving = node.router.layout.engines
        assert [node.pools.available(spec) for spec in serving] == [0] * len(serving), "blocks that nobody uses"
        assert all(
            node.pools.counts(spec)[0] == SETTINGS.standby_blocks for spec in SPECS.values() if spec not in serving
        ), "an engine outside the layout has more than it needs"
    holders = node.router.places.holders()
    places = Counter(rid for holder in holders for rid in holder.in_flight)
    assert all(count == 1 for count in places.values()), places
    assert {rid: holder.name for holder in holders for rid in holder.in_flight} == {
        rid: holder.name for rid, holder in node.router.places.where.items()
    }
    assert not node.router.moving.in_flight
    ended = node.ended()
    assert all(count == 1 for count in ended.values()), ended
    assert set(places) | set(ended) | set(node.router.waiting.paused) | set(node.router.long.waiting) == node.sent
    assert not set(places) & set(ended)
    for name, fake in node.fakes.items():
        held = {rid for hold, (rid, _, _) in fake.leaving.items() if hold not in fake.gone}
        assert {*fake.running, *held} == set(node.router.engines[name].in_flight), name
        assert not fake.coming
        goes = {going.number for going in node.modes.handovers._ahead.to(fake.spec)}
        assert set(fake.early) <= goes, "nobody knows of what came ahead"
        assert set(fake.leaving) == {hold for spec, hold in node.modes.handovers._waiting if spec.name == name}, (
            "held for nobody"
        )
    kept = {rid for export in node.modes.kept.exports.values() for rid in export.rids}
    held = {rid for fake in node.fakes.values() if fake.held is not None for rid in fake.held[1]}
    assert held == kept
    assert set(node.router.journal) == set(places)
    goes = [going for going in node.modes.handovers._ahead if going.tickets]
    for gpu, ledger in node.pools._ledgers.items():
        read = {b for going in goes for ticket in going.tickets for b in ticket.reads.get(gpu, ())}
        assert set(ledger._memory.copies.nonzero()[0]) == read, "a copy that never ends"
