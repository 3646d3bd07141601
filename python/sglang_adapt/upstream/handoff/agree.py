"""One decision for all ranks of an engine: what one of them cannot do, none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sglang_adapt.upstream.rank_link import link_of

Result = TypeVar("Result")


class UnderWay(Protocol):
    """What has begun on a rank, `engine.copying.Pulled`."""

    @property
    def by_host(self) -> bool:
        """Some of it, on this rank or another one, is the work of processes: it may fail, and what relies on it has to
        see first that it has ended and has not. The same on all ranks."""

    @property
    def ended(self) -> bool:
        """Has the work of processes ended?"""

    @property
    def fault(self) -> str | None:
        """Why that has failed; None if it has not."""

    def wait(self) -> None:
        """Until it has ended."""

    def hold_back(self, stream: Any) -> None:
        """What is put into a stream of the rank's GPU from now on starts when it has ended."""


class OtherRankFailedError(RuntimeError):
    """Another rank of the engine could not do its part; its own answer says why. This rank has done nothing."""


def on_all_ranks(scheduler: Any, what: str, function: Callable[[], Result]) -> Result:
    """`function()`, which changes nothing, on every rank of the engine at once.

    Raises:
        OtherRankFailedError: it has failed on another rank.
        Exception: it has failed here.
    """
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 -- it is raised below, once the other ranks know
        failure = error
    if not true_on_all_ranks(scheduler, failure is None) and failure is None:
        raise OtherRankFailedError(f"another rank of this engine failed to {what}; see its answer")
    if failure is not None:
        raise failure
    return result


def true_on_all_ranks(scheduler: Any, mine: bool) -> bool:
    """Is it true on every rank of the engine? Asked on all of them at once."""
    if scheduler.ps.tp_size == 1:
        return mine
    return link_of(scheduler.tp_group).all_true(mine)


def start_on_all_ranks(scheduler: Any, what: str, start: Callable[[], UnderWay]) -> UnderWay:
    """Begin something on every rank of the engine at once; returns what is under way here.

    Raises:
        OtherRankFailedError, Exception: as `on_all_ranks`; nothing is under way then.
    """
    started: list[UnderWay] = []
    try:
        on_all_ranks(scheduler, what, lambda: started.append(start()))
    except Exception:
        # Nobody may get the pages while they are being written.
        for one in started:
            one.wait()
        raise
    return started[0]
