"""The layout as the engines themselves say it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import EngineSpec, Layout
from sglang_adapt.router.calls import EngineCallError
from sglang_adapt.router.engine import EngineState
from sglang_adapt.router.modes import Modes
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Switch

TRIES = 5
"""How often engines are asked before what they say is told although the layout has changed meanwhile."""


class Readback:
    """See the module.

    Args:
        router: where requests are.
        pools: the way to the engines' ranks.
        modes: the layout that serves, and its changes.
        specs: all candidates by name.
        sequences: TP sizes whose engines may run batches sequence-parallel.
        kv_copy: the way of copies between GPUs.
    """

    def __init__(
        self,
        router: Router,
        pools: Pools,
        modes: Modes,
        specs: Mapping[str, EngineSpec],
        sequences: Collection[int] = (),
        kv_copy: CopyPath = CopyPath.PEER,
    ) -> None:
        self._router = router
        self._pools = pools
        self._modes = modes
        self._specs = specs
        self._sequences = sequences
        self._kv_copy = kv_copy

    async def read(self) -> dict[str, Any]:
        """Ask all engines at once, again if the layout has become another one meanwhile: all is told of one moment.

        If it does so `TRIES` times in a row, what engines say may be older than the rest.

        Returns:
            `active`: the layout that the router has; `serving`: the engines that get requests and whose ranks, asked
            now, all have the same blocks to serve with; `switching_from`, `switching_to`: of the switch that is under
            way, of which `active` is one, or None; `epoch`; `kv_copy`: the way of copies between GPUs; `kept`: by
            engine, the requests that it keeps; `roles`: what each engine of the layout does now; `handovers`: see
            `Handovers.said`; `engines`: state, requests in flight, and what the ranks say of lease and cache, or the
            error; with sequence parallelism also `sequence`: from how many tokens on, and how many batches ran so.
        """
        for _ in range(TRIES):
            before = self._state()
            entries = await asyncio.gather(*(self._entry(spec) for spec in self._specs.values()))
            if self._state() == before:
                break
        engines = dict(zip(self._specs, entries, strict=True))
        switch = self._modes.current
        return {
            "active": str(self._router.layout),
            "serving": [name for name, entry in engines.items() if self._router.sends_to(name) and _confirmed(entry)],
            "switching_from": None if switch is None else str(switch.before),
            "switching_to": None if switch is None else str(switch.after),
            "epoch": self._pools.epoch,
            "kv_copy": self._kv_copy.value,
            "roles": {name: role.value for name, role in self._router.roles.items()},
            "handovers": self._modes.handovers.said(),
            "kept": {str(spec): len(export.requests) for spec, export in self._modes.kept.exports.items()},
            "engines": engines,
        }

    def _state(self) -> tuple[Layout, Switch | None, int, tuple[EngineState, ...]]:
        """What must not change while engines are asked."""
        states = tuple(self._router.engines[name].state for name in self._specs)
        return self._router.layout, self._modes.current, self._pools.epoch, states

    async def _entry(self, spec: EngineSpec) -> dict[str, Any]:
        """One engine: its state, and what its ranks say."""
        engine = self._router.engines[spec.name]
        ranks = await self._ranks(spec) if engine.state is EngineState.READY else {}
        return {"state": engine.state.value, "in_flight": len(engine.in_flight)} | ranks

    async def _ranks(self, spec: EngineSpec) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        try:
            ranks = await self._pools.ask(spec, "kv_state", {})
            if spec.tp in self._sequences:
                entry["sequence"] = (await self._pools.ask(spec, "sequence", {}))[0]
        except EngineCallError as error:
            return entry | {"error": str(error)}
        leased = [len(rank["pages"]) for rank in ranks]
        if len(set(leased)) > 1:
            return entry | {"error": f"{spec}: its ranks have {leased} blocks, which should be one number"}
        first = ranks[0]
        return entry | {
            "leased_blocks": leased[0],
            "free_blocks": first["free"],
            "cached_tokens": first["cached_tokens"],
        }


def _confirmed(entry: Mapping[str, Any]) -> bool:
    """Have an engine's ranks said that they have blocks to serve with?"""
    return bool(entry.get("leased_blocks"))
