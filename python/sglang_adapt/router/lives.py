"""Which engines are up, and whether one is still the one that it was."""

from __future__ import annotations

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.router import Router


class Lives:
    """See the module.

    Args:
        router: knows the state of engines.
        pools: count how often each has died.
    """

    def __init__(self, router: Router, pools: Pools) -> None:
        self._router = router
        self._pools = pools

    def is_up(self, spec: EngineSpec) -> bool:
        return self._router.is_ready(spec.name)

    def is_same(self, spec: EngineSpec, deaths: int) -> bool:
        """Is an engine up that had died `deaths` times, and does it hold what it held then?"""
        return self.is_up(spec) and self._pools.deaths(spec) == deaths
