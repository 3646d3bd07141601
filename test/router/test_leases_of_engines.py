"""Leases of real engines, changed by the router while they serve."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_router import LiveRouter

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.calls import CallRefusedError

pytestmark = [pytest.mark.engine, pytest.mark.full]

ONE, OTHER, BOTH = EngineSpec(0, 1), EngineSpec(1, 1), EngineSpec(0, 2)
BLOCKS, STANDBY = 128, 3
FULL = {"tp1@0": (BLOCKS, 0), "tp1@1": (BLOCKS, 0), "tp2@0-1": (STANDBY, 0)}
PROMPT = [5, 9, 200, 31, 77, 8]


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="adapt-") as folder:
        live = LiveRouter(Path(folder), "--max-total-tokens", str(16 * BLOCKS), "--page-size", "16")
        yield live
        live.close()


def counts(router: LiveRouter) -> dict[str, tuple[int | None, int | None]]:
    return {name: (engine.leased_blocks, engine.free_blocks) for name, engine in router.status().items()}


def test_the_layout_has_all_blocks_and_idle_engines_a_few(router: LiveRouter) -> None:
    assert counts(router) == {"tp1@0": (BLOCKS, 0), "tp1@1": (BLOCKS, 0), "tp2@0-1": (STANDBY, 0)}
    router.check()


def test_a_lease_shrinks_and_grows_under_running_requests(router: LiveRouter) -> None:
    rids = [f"plain-{i}" for i in range(4)]
    for rid in rids:
        router.send(rid, PROMPT, 300)
    expected = router.receive(*rids)
    assert len({tuple(ids) for ids in expected.values()}) == 1
    rids = [f"moving-{i}" for i in range(4)]
    for rid in rids:
        router.send(rid, PROMPT, 300)
    router.until(lambda: router.process._router.in_flight == 4, "all are accepted")
    for _ in range(5):
        given = router.call(router.pools.give_back(ONE, 40))
        assert len(given[0]) == 40
        assert router.here(router.pools.counts, ONE) == (BLOCKS - 40, 40)
        assert router.call(router.pools.grow(ONE, 40)).tolist() == [sorted(given[0])]
    assert router.process._router.in_flight > 0, "all of that happened while they ran"
    got = router.receive(*rids)
    assert list(got.values()) == list(expected.values())
    router.check()


def test_a_lease_that_requests_hold_does_not_shrink(router: LiveRouter) -> None:
    router.send("long", PROMPT, 600)
    router.until(lambda: router.process._router.in_flight == 1, "it is accepted")
    [name] = [name for name, engine in router.status().items() if engine.in_flight]
    spec = next(spec for spec in router.candidates if spec.name == name)
    # Its first page is allocated with its first batch, which comes before any later call.
    router.ask(spec, "kv_state")
    before = router.here(router.pools.lease, spec)
    with pytest.raises(CallRefusedError, match=f"{name}: the lease of {BLOCKS} pages is to give {BLOCKS} back"):
        router.call(router.pools.give_back(spec, BLOCKS))
    assert router.here(router.pools.lease, spec) == before
    assert router.process._router.in_flight == 1
    router.receive("long")
    router.check()


def test_blocks_move_to_an_engine_of_another_tp_size_and_back(router: LiveRouter) -> None:
    for spec in (ONE, OTHER):
        router.call(router.pools.give_back(spec, BLOCKS - STANDBY))
    free = router.here(router.pools.available, BOTH)
    assert free == BLOCKS - STANDBY
    router.call(router.pools.grow(BOTH, free))
    router.check()
    states = router.ask(BOTH, "kv_state")
    assert [state["free"] + state["cached_tokens"] // 32 for state in states] == [BLOCKS, BLOCKS]
    router.call(router.pools.give_back(BOTH, free))
    for spec in (ONE, OTHER):
        router.call(router.pools.grow(spec, free))
    assert counts(router) == {"tp1@0": (BLOCKS, 0), "tp1@1": (BLOCKS, 0), "tp2@0-1": (STANDBY, 0)}
    router.check()


@pytest.mark.parametrize("spec", [BOTH, ONE])
def test_the_blocks_of_a_killed_engine_return_and_are_leased_to_it_again(router: LiveRouter, spec: EngineSpec) -> None:
    before = router.status()[spec.name]
    os.kill(before.pids[-1], signal.SIGKILL)
    router.until(lambda: router.status()[spec.name].restarts == before.restarts + 1, "it is started again")
    router.until(lambda: router.status()[spec.name].state == "ready", "it is back")
    router.until(lambda: counts(router) == FULL, "the layout's engines have all blocks")
    router.check()


def test_a_call_that_nobody_knows_changes_nothing(router: LiveRouter) -> None:
    with pytest.raises(CallRefusedError, match=r"rank 1: nothing is called 'sing'; there is .*kv_grow"):
        router.ask(BOTH, "sing")
    router.check()


def test_after_a_keepers_death_the_ledgers_begin_anew(router: LiveRouter) -> None:
    """One keeper has both virtual GPUs, so all engines go and come back."""
    epoch, before = router.pools.epoch, router.status()
    [keeper] = router.here(lambda: list(router.process._keepers.pids.values()))
    os.kill(keeper, signal.SIGKILL)
    router.until(
        lambda: all(
            engine.state == "ready" and engine.restarts == before[name].restarts + 1
            for name, engine in router.status().items()
        ),
        "all engines are back",
    )
    assert router.pools.epoch == epoch + 1
    router.until(lambda: counts(router) == FULL, "the layout's engines have all blocks")
    router.check()
    router.send("after", PROMPT, 8)
    assert len(router.receive("after")["after"]) >= 8
