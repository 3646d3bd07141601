"""One forkserver and one folder of tiny models for all tests of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from weights_engines import forkserver, server_args_of
from weights_models import write_model

from sglang_adapt.keeper import KeeperConfig, KeeperHandle, start_keeper
from sglang_adapt.weights import WHOLE, Part

KEEPER_LIMIT_S = 120


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    return forkserver()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a model of `models.MODELS`, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        path = folder / name
        return path if path.exists() else write_model(name, folder)

    return get


@pytest.fixture(scope="session")
def keeper(context: ForkServerContext, model: Callable[[str], Path]) -> Iterator[Callable[..., KeeperHandle]]:
    """A ready keeper of a model; one for each set of arguments."""
    from sglang.srt.server_args import ServerArgs

    keepers: dict[tuple, KeeperHandle] = {}

    def get(
        name: str, finest_tp: int, load_format: str = "auto", path: Path | None = None, part: Part = WHOLE
    ) -> KeeperHandle:
        key = (name, finest_tp, load_format, path, part)
        if key not in keepers:
            args = ServerArgs(**server_args_of(path or model(name), load_format=load_format))
            keepers[key] = start_keeper(context, KeeperConfig(args, finest_tp, (0, 1, 2, 3), part=part))
            keepers[key].wait_ready(timeout_s=KEEPER_LIMIT_S)
        return keepers[key]

    yield get
    for handle in keepers.values():
        handle.stop()
