"""Giving engines of the layout the blocks that are free."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.calls import CallRefusedError, EngineCallError
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools

logger = logging.getLogger(__name__)


async def fill(pools: Pools, up: Lives, specs: Iterable[EngineSpec]) -> None:
    """Give each of these engines that is up, and in the layout, all blocks that it may have.

    One that cannot take them is killed: it could hold no request for long, or nobody knows what it has.
    """
    for spec in specs:
        if not up.is_up(spec):
            continue
        try:
            await pools.fill(spec)
        except CallRefusedError as error:
            pools.kill(spec, str(error))
        except EngineCallError as error:
            logger.error("%s did not get its blocks: %s", spec, error)
        except Exception:
            # A fault in this program.
            logger.exception("%s: giving it its blocks broke off", spec)
            pools.kill(spec, "giving it its blocks broke off")
