"""Servers on virtual GPUs that tests share; each is started once, when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server import Server
from sglang_adapt.demo import demo_model_path

_NO_BLANKS = "--constrained-json-disable-any-whitespace"
"""A small model otherwise fills structured output with blanks for ever."""

STOCK_FLAGS = ["--model-path", str(demo_model_path()), "--dtype", "float32", "--max-total-tokens", "32768", _NO_BLANKS]
"""What stock needs to be told to run as ours does by default on virtual GPUs."""

LAYOUTS = {
    "tp1": ["--adapt-virtual-gpus", "2"],
    "tp2": ["--adapt-virtual-gpus", "2", "--adapt-layout", "tp2@0-1"],
    "tp4": ["--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "4"],
}


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server of ours with the given flags; ends all of them at the end of the session."""
    running: list[Server] = []

    def start_server(name: str, *flags: str) -> Server:
        log: Path = tmp_path_factory.mktemp("logs") / f"{name}.log"
        server = Server(name, "sglang_adapt.launch_server", list(flags), log).__enter__()
        running.append(server)
        return server

    yield start_server
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def ours(start: Callable[..., Server]) -> Callable[[str], Server]:
    """A running server of ours by the key of its layout."""
    servers: dict[str, Server] = {}

    def get(key: str) -> Server:
        if key not in servers:
            servers[key] = start(key, *LAYOUTS[key], _NO_BLANKS)
        return servers[key]

    return get


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock sglang at TP 1 on the same model."""
    log = tmp_path_factory.mktemp("logs") / "stock.log"
    flags = [*STOCK_FLAGS, "--sleep-on-idle"]
    with Server("stock", "sglang.launch_server", flags, log, {"OMP_NUM_THREADS": "1"}) as server:
        yield server
