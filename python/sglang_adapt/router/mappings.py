"""Which engines can get at the KV of all GPUs: each maps their regions, or is told who sends it, once, and anew when it
or a keeper has died."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.keeper import KeeperError
from sglang_adapt.kv.staged_handle import KvHandle
from sglang_adapt.router.pools import Pools


class Mappings:
    """See the module.

    Args:
        pools: the way to the engines' ranks.
        regions: how the KV of each GPU is reached now; raises KeeperError while a keeper is being started again.
    """

    def __init__(self, pools: Pools, regions: Callable[[], dict[int, KvHandle]]) -> None:
        self._pools = pools
        self._regions = regions
        self._mapped: dict[EngineSpec, tuple[int, dict[int, KvHandle]]] = {}

    def has(self, spec: EngineSpec) -> bool:
        """Has an engine mapped all that there is now?"""
        return bool(self.those([spec]))

    def those(self, specs: Iterable[EngineSpec]) -> list[EngineSpec]:
        """Those of these engines that have. All keepers are looked at, once."""
        try:
            regions = self._regions()
        except KeeperError:
            # One is being started again.
            return []
        return [spec for spec in specs if self._mapped.get(spec) == (self._pools.deaths(spec), regions)]

    async def map(self, spec: EngineSpec) -> None:
        """Let an engine map what it has not. Raises EngineCallError, KeeperError."""
        wanted = self._wanted(spec)
        if self._mapped.get(spec) == wanted:
            return
        regions = {str(gpu): msgspec.to_builtins(handle) for gpu, handle in wanted[1].items()}
        await self._pools.ask(spec, "kv_map", {"regions": regions})
        self._mapped[spec] = wanted

    def _wanted(self, spec: EngineSpec) -> tuple[int, dict[int, KvHandle]]:
        return self._pools.deaths(spec), self._regions()
