"""What the router tells the front of its engines."""

from __future__ import annotations

from sglang_adapt.core.layout import Role
from sglang_adapt.core.messages import EngineStatus, RouterStatus
from sglang_adapt.router.router import Router


def status_of(router: Router) -> RouterStatus:
    """The layout, its limit, and each engine as it is now."""
    active = {spec.name for spec in router.layout.engines}
    return RouterStatus(
        layout=str(router.layout),
        request_tokens=router.request_tokens,
        engines=[
            EngineStatus(
                name=engine.name,
                state=engine.state.value,
                active=engine.name in active,
                role=router.roles.get(engine.name, Role.MIXED).value,
                in_flight=len(engine.in_flight),
                restarts=engine.restarts,
                pids=engine.pids,
                last_death=engine.last_death,
                leased_blocks=None if engine.blocks is None else engine.blocks[0],
                free_blocks=None if engine.blocks is None else engine.blocks[1],
            )
            for engine in router.engines.values()
        ],
    )
