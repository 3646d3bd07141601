"""Batches that run sequence-parallel give the tokens of stock's tensor-parallel engines of the same size."""

from __future__ import annotations

import random
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from weights_engines import EngineCase, EngineProcess, server_args_of
from weights_models import MODELS

from sglang_adapt.keeper import KeeperHandle
from sglang_adapt.weights import Part

pytestmark = pytest.mark.engine

FINEST_TP = 4
NEW_TOKENS = 12
CHUNK = 64
ABOVE_DECODE = 20
"""Tokens of a batch that decode steps of these tests do not reach."""
DEFAULT = {("llama_tied", 2, 1), ("qwen3_one_kv_head", 2, 1), ("llama_tied", 4, 2)}
"""Model, TP size, and the TP size of the weights that sequence-parallel batches run on."""

Keeper = Callable[..., KeeperHandle]
Model = Callable[[str], Path]


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(length)] for length in lengths]


FIRST = prompts(1, 1, 33, 150, 64, 7)
"""Alone and in parts, of which some are no multiple of the ranks."""
TAILS = prompts(2, 9, 1, 30, 64, 17)


def _cases() -> list[Any]:
    return [
        pytest.param(name, tp, base, marks=() if (name, tp, base) in DEFAULT else pytest.mark.full)
        for name in MODELS
        for tp, base in ((2, 1), (4, 1), (4, 2))
        if MODELS[name].fp8 is None and MODELS[name].family != "Qwen3Moe"
    ]


def talk(engine: EngineProcess) -> list[Any]:
    """Prompts, and answers to what was said about them, which finds its beginning in the prefix cache."""
    engine.call(_flush)
    first = engine.generate(FIRST, NEW_TOKENS)
    longer = [p + answer.ids + tail for p, answer, tail in zip(FIRST, first, TAILS, strict=True)]
    second = engine.generate(longer, NEW_TOKENS)
    alone = engine.generate(FIRST[2:3], NEW_TOKENS)
    return [answer.ids for answer in (*first, *second, *alone)] + engine.call(_prompt_logprobs, FIRST[1:4])


def _flush(engine: Any) -> None:
    engine.flush_cache()


def _prompt_logprobs(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Log probabilities of prompts, rounded: their last bits are those of other sums."""
    results = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [[round(token[0], 2) for token in result["meta_info"]["input_token_logprobs"][1:]] for result in results]


@pytest.mark.parametrize(("name", "tp_size", "base_tp"), _cases())
def test_tokens_are_stocks_in_every_mode(
    context: ForkServerContext, model: Model, keeper: Keeper, tmp_path: Path, name: str, tp_size: int, base_tp: int
) -> None:
    args = server_args_of(model(name), tp_size=tp_size, disable_radix_cache=False, chunked_prefill_size=CHUNK)
    with EngineProcess.start(context, EngineCase(args)) as engine:
        expected = talk(engine)
    assert len({token for ids in expected[: len(FIRST)] for token in ids}) > NEW_TOKENS / 2, "the model says something"
    # Each rank has the store that it would have where TP `base_tp` is the smallest size.
    stores = tuple(keeper(name, FINEST_TP, part=Part(index, base_tp)).weights for index in range(base_tp))
    case = EngineCase(args, stores, sp_tokens=1, base_tp=base_tp)
    with EngineProcess.start(context, case) as engine:
        ran = []
        for tokens, at_random in ((1, False), (ABOVE_DECODE, False), (None, False), (1, True)):
            engine.run_sequences(tokens, at_random)
            before = engine.batches(tmp_path)[0]["batches"]
            assert talk(engine) == expected, (tokens, at_random)
            ranks = engine.batches(tmp_path)
            assert len(ranks) == tp_size and all(rank == ranks[0] for rank in ranks)
            assert ranks[0]["unable"] == {}
            assert ranks[0]["base"] == {"sp": tp_size // base_tp, "tp": base_tp}
            after = ranks[0]["batches"]
            ran.append({mode: {kind: after[mode][kind] - n for kind, n in before[mode].items()} for mode in after})
    always, prefill, never, mixed = ran
    assert always["tp"] == {"prefill": 0, "decode": 0}
    assert min(always["sp"].values()) >= NEW_TOKENS / 4
    assert prefill["sp"]["decode"] == 0 and prefill["tp"]["decode"] >= NEW_TOKENS and prefill["sp"]["prefill"] >= 6
    assert never["sp"] == {"prefill": 0, "decode": 0} and min(never["tp"].values()) > 0
    assert min(*mixed["sp"].values(), *mixed["tp"].values()) >= 3
