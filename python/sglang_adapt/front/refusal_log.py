"""Refusals in the server's log: a line every some seconds, not one each, which would cost more than refusing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextvars import ContextVar

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""How often a line is written while requests are refused."""
_refusing: ContextVar[bool] = ContextVar("refusing", default=False)


class RefusalLog:
    """Counts refusals by tier. To be used on an event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def refused(self, tier: str) -> None:
        """A request of a tier was refused."""
        if not self._counts:
            asyncio.get_running_loop().call_later(INTERVAL_S, self._tell)
        self._counts[tier] += 1

    def _tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        told = ", ".join(f"{count} of tier {tier}" for tier, count in sorted(counts.items()))
        logger.info("refused with a 429 in the last %.0f s: %s", INTERVAL_S, told)


def keep_out_of_access_log() -> None:
    """Let `refusing` tell uvicorn's access log. To be called when the HTTP server has set up its logging.

    uvicorn asks the logger before it makes a record; a filter would come after that, which is most of the cost.
    """
    access = logging.getLogger("uvicorn.access")
    enabled_for = type(access).isEnabledFor

    def is_enabled_for(level: int) -> bool:
        return not _refusing.get() and enabled_for(access, level)

    access.isEnabledFor = is_enabled_for  # type: ignore[method-assign]


def refusing() -> None:
    """The request of this task is refused: it gets no line in the access log."""
    _refusing.set(True)
