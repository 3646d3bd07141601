"""Servers on virtual GPUs that tests share; each is started once, when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from forked_servers import ForkedServer
from two_processes import shared_by

from server import Server
from sglang_adapt.demo import demo_model_path

_NO_BLANKS = "--constrained-json-disable-any-whitespace"
"""A small model otherwise fills structured output with blanks for ever."""

STOCK_FLAGS = ["--model-path", str(demo_model_path()), "--dtype", "float32", "--max-total-tokens", "32768", _NO_BLANKS]
"""What stock needs to be told to run as ours does by default on virtual GPUs."""

SERVERS = {
    "two": ["--adapt-virtual-gpus", "2", "--enable-metrics"],
    "four": ["--adapt-virtual-gpus", "4", "--adapt-tp-sizes", "4"],
}
LAYOUTS = {"tp1": ("two", "tp1@0,tp1@1"), "tp2": ("two", "tp2@0-1"), "tp4": ("four", None)}
"""By key: the server that has it, and the layout to go over to."""


_of_the_session: list[Callable[[], None]] = []
"""End the servers of the session."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Of two processes each runs the tests that share servers in a row: behind the last one these end, for the sake of
    memory."""
    if hasattr(item.config, "workerinput") and nextitem is not None:
        here, there = (shared_by(one.nodeid.partition("::")[0]) for one in (item, nextitem))
        while here != there and _of_the_session:
            _of_the_session.pop()()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server of ours with the given flags; ends all of them at the end of the module."""
    with _Servers(tmp_path_factory) as servers:
        yield servers.start


@pytest.fixture(scope="module")
def start_by_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """The same by `python -m sglang_adapt.launch_server`, which loads sglang first: for tests of a server's end."""
    with _Servers(tmp_path_factory, Server) as servers:
        yield servers.start


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """A running server of ours, in the layout of the key; TP 1 and TP 2 are two layouts of one server."""
    running: dict[str, Server] = {}

    def get(key: str) -> Server:
        name, layout = LAYOUTS[key]
        if name not in running:
            running[name] = servers.start(name, *SERVERS[name], _NO_BLANKS)
        server = running[name]
        if layout is not None:
            answer = httpx.post(f"{server.url}/adapt/layout", json={"layout": layout}, timeout=180)
            assert answer.status_code == 200, answer.text
        return server

    with _Servers(tmp_path_factory) as servers:
        _of_the_session.append(servers.stop)
        yield get


class _Servers:
    """Servers of ours that end together."""

    def __init__(self, folders: pytest.TempPathFactory, kind: type[Server] = ForkedServer) -> None:
        self._folders, self._kind = folders, kind
        self._running: list[Server] = []

    def start(self, name: str, *flags: str) -> Server:
        log: Path = self._folders.mktemp("logs") / f"{name}.log"
        server = self._kind(name, "sglang_adapt.launch_server", list(flags), log).__enter__()
        self._running.append(server)
        return server

    def __enter__(self) -> _Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in self._running:
            server.stop()


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock sglang at TP 1 on the same model."""
    log = tmp_path_factory.mktemp("logs") / "stock.log"
    flags = [*STOCK_FLAGS, "--sleep-on-idle"]
    with Server("stock", "sglang.launch_server", flags, log, {"OMP_NUM_THREADS": "1"}) as server:
        _of_the_session.append(server.stop)
        yield server


SHOWN_TIERS = """\
default: standard
tiers:
  - {name: chat, ttft_ms: 60000, tpot_ms: 60000, when_infeasible: reject, queue_limit: 24, service_tiers: [priority]}
  - {name: standard, ttft_ms: 60000, tpot_ms: 60000}
  - {name: night, background: true, service_tiers: [flex]}
"""


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with all that there is to see: two virtual GPUs, two TP sizes, tiers, planner, both ways, metrics."""
    config = tmp_path_factory.mktemp("shown") / "tiers.yaml"
    config.write_text(SHOWN_TIERS)
    with _Servers(tmp_path_factory) as servers:
        flags = ["--adapt-virtual-gpus", "2", "--adapt-slo-config", str(config), "--adapt-policy", "auto"]
        _of_the_session.append(servers.stop)
        yield servers.start("shown", *flags, "--adapt-sp", "32", "--enable-metrics")
