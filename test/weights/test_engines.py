"""Stock engines on one shared copy give what stock engines with their own weights give, to the last bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from weights_engines import EngineCase, EngineProcess, Output, server_args_of
from weights_models import MODELS

from sglang_adapt.keeper import KeeperHandle
from sglang_adapt.memory import HostHandle

pytestmark = pytest.mark.engine

FINEST_TP = 4
NEW_TOKENS = 24
PROMPTS = [[random.Random(length).randrange(2, 500) for _ in range(length)] for length in (1, 5, 33, 150)]
DEFAULT = {
    ("llama_tied", 1),
    ("llama_tied", 4),
    ("qwen2", 1),
    ("qwen3", 2),
    ("qwen3_moe", 1),
    ("qwen3_moe", 2),
}

Keeper = Callable[..., KeeperHandle]
Model = Callable[[str], Path]


def _cases() -> list[Any]:
    return [
        pytest.param(name, tp, marks=() if (name, tp) in DEFAULT else pytest.mark.full)
        for name in MODELS
        for tp in (1, 2, 4)
        if MODELS[name].fp8 is None
    ]


def outputs_of(context: ForkServerContext, case: EngineCase) -> list[Output]:
    with EngineProcess.start(context, case) as engine:
        return engine.generate(PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def stock(context: ForkServerContext, model: Model) -> Callable[[str, int], list[Output]]:
    """Outputs of a stock engine that has loaded its own weights."""
    known: dict[tuple[str, int], list[Output]] = {}

    def get(name: str, tp_size: int) -> list[Output]:
        if (name, tp_size) not in known:
            args = server_args_of(model(name), tp_size=tp_size)
            known[name, tp_size] = outputs_of(context, EngineCase(args))
        return known[name, tp_size]

    return get


@pytest.mark.parametrize(("name", "tp_size"), _cases())
def test_views_give_stock_outputs(
    context: ForkServerContext,
    model: Model,
    keeper: Keeper,
    stock: Callable[[str, int], list[Output]],
    name: str,
    tp_size: int,
) -> None:
    args = server_args_of(model(name), tp_size=tp_size)
    shared = outputs_of(context, EngineCase(args, keeper(name, FINEST_TP).weights))
    own = stock(name, tp_size)
    assert [output.ids for output in shared] == [output.ids for output in own]
    assert [output.logprobs for output in shared] == [output.logprobs for output in own]
    assert len({token for output in own for token in output.ids}) > NEW_TOKENS / 2, "the model says something"


def test_reading_the_block_order_as_stock_order_gives_other_outputs(
    context: ForkServerContext, model: Model, keeper: Keeper, stock: Callable[[str, int], list[Output]]
) -> None:
    args = server_args_of(model("qwen2"), tp_size=1)
    wrong = outputs_of(context, EngineCase(args, keeper("qwen2", FINEST_TP).weights, ignore_block_order=True))
    right = stock("qwen2", 1)
    pairs = [(a, b) for x, y in zip(wrong, right, strict=True) for a, b in zip(x.ids, y.ids, strict=True)]
    assert sum(a == b for a, b in pairs) < len(pairs) / 10


def test_several_engines_hold_the_weights_once(context: ForkServerContext, model: Model, keeper: Keeper) -> None:
    handle = keeper("llama_tied", FINEST_TP)
    region = handle.weights.region
    assert isinstance(region, HostHandle)
    with (
        EngineProcess.start(context, EngineCase(server_args_of(model("llama_tied"), tp_size=1), handle.weights)) as one,
        EngineProcess.start(context, EngineCase(server_args_of(model("llama_tied"), tp_size=2), handle.weights)) as two,
    ):
        for engine in (one, two):
            engine.generate(PROMPTS, 4)
        ranks = one.pids() + two.pids()
        assert len(ranks) == 3
        rss, pss = zip(*(mapped_bytes(pid, region.inode) for pid in [*ranks, handle.process.pid]), strict=True)
    pages = -(-region.nbytes // 4096) * 4096
    assert all(bytes_ > pages / 3 for bytes_ in rss), "every process has its part of the weights mapped"
    assert sum(rss) > 2.5 * pages
    assert abs(sum(pss) - pages) < pages / 50, "together they are resident once"


def mapped_bytes(pid: int, inode: int) -> tuple[int, int]:
    """Resident bytes of a file in a process, and its proportional share of them."""
    rss = pss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.split()[4] == str(inode)
        elif inside and (found := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            if found[1] == "Rss":
                rss += int(found[2]) * 1024
            else:
                pss += int(found[2]) * 1024
    return rss, pss


def test_an_online_weight_update_is_refused(context: ForkServerContext, model: Model, keeper: Keeper) -> None:
    path = model("llama_tied")
    case = EngineCase(server_args_of(path, tp_size=1), keeper("llama_tied", FINEST_TP).weights)
    with EngineProcess.start(context, case) as engine:
        before = engine.generate(PROMPTS, 4)
        success, text = engine.update_weights(path)
        assert not success and "shared by the engines of all TP sizes" in text
        assert engine.generate(PROMPTS, 4) == before


def test_dummy_weights_are_those_of_a_stock_engine_with_the_synthetic_loader(
    context: ForkServerContext, model: Model, keeper: Keeper
) -> None:
    path = model("qwen2_tied")
    shared = EngineCase(server_args_of(path, tp_size=2), keeper("qwen2_tied", FINEST_TP, "dummy").weights)
    from sglang_adapt.upstream.weights.synthetic import SyntheticLoader

    own = EngineCase(server_args_of(path, tp_size=2, load_format=SyntheticLoader))
    assert outputs_of(context, shared) == outputs_of(context, own)
