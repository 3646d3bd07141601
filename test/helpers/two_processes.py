"""Which tests run in the same process when there are several (`pytest -n 2`)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

ENGINES = ("handoff", "keeper", "kv", "upstream", "weights")
"""Rooms whose tests start engines and keepers, all from one forkserver."""


class BySharing(LoadScopeScheduling):
    """One process has the servers that tests share, another what starts engines; files go to whichever is idle."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid)


def shared_by(nodeid: str) -> str:
    """What a test shares with others, by its name: `servers`, `engines`, or what is in its file."""
    file = nodeid.partition("::")[0]
    if file.startswith("test/serving/"):
        return "servers"
    return "engines" if file.startswith(tuple(f"test/{room}/" for room in ENGINES)) else file
