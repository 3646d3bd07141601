"""What this process's rank has exported and still answers for: its requests wait for `release` or `restore`.

Held requests keep their slots, KV and cache locks; the pages that are theirs alone are out of the lease. Stock does not
see them in any queue: see `bookkeeping`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_adapt.upstream.handoff.quiesce import Taken


@dataclass
class Held:
    """An export that is neither released nor restored.

    Attributes:
        epoch: that of the switch.
        taken: the requests.
        pages: those that are out of the lease, ascending.
        aborted: ids of requests that their clients have given up since.
    """

    epoch: int
    taken: Taken
    pages: list[int]
    aborted: set[str] = field(default_factory=set)

    def abort(self, rid: str, abort_all: bool) -> list[str]:
        """Mark requests as given up; returns the ids meant, as stock's `abort_request` understands `rid`."""
        meant = [req.rid for req in self.taken.all if abort_all or req.rid.startswith(rid)]
        self.aborted.update(meant)
        return meant


_held: Held | None = None


def held() -> Held | None:
    return _held


def hold(export: Held) -> None:
    global _held
    _held = export


def let_go() -> None:
    global _held
    _held = None
