"""Which tests run in the same process when there are several (`pytest -n 2`), and in which order they are given out."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
FORKED = re.compile(r"^from (weights_engines|handoff_node|kv_pool_children|kv_engines) import", re.M)
"""What a file says whose tests start engines or keepers, all from one forkserver, which takes 12 s to start."""
SERVERS = {"servers": re.compile(r"\b(ours|stock): "), "shown": re.compile(r"\bshown: ")}
"""Arguments of tests that use servers of the session, by the name of these."""


class BySharing(LoadScopeScheduling):
    """Files go to whichever process is idle, in order of collection; those that share servers or a forkserver as one.

    So what takes long, in the middle of the alphabet, is begun early, and in the end there are small things for both.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid.partition("::")[0])


@cache
def shared_by(file: str) -> str:
    """What the tests of a file share with those of others: servers or a forkserver; its own name if they share none."""
    text = (ROOT / file).read_text()
    if file.startswith("test/serving/"):
        return next((name for name, used in SERVERS.items() if used.search(text)), file)
    return "engines" if FORKED.search(text) or file.startswith("test/weights/") else file
