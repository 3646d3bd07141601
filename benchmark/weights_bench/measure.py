"""What is measured in an engine: steps, tokens, and the time of single requests. Runs in the engine's process."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """How much to measure.

    Attributes:
        batches: batch sizes of the decode steps.
        context: tokens of each prompt.
        steps: decode steps after the prefill.
        prefill_batch: prompts of the prefill in the table.
        repeats: measurements of each; the shortest counts.
        token_prompts, new_tokens: lengths of the prompts whose greedy tokens are compared, and tokens of each.
        vocabulary: ids below this are used.
        idle_s: how long engines are left idle before their first step is timed.
    """

    batches: tuple[int, ...]
    context: int
    steps: int
    prefill_batch: int
    repeats: int
    token_prompts: tuple[int, ...]
    new_tokens: int
    vocabulary: int
    idle_s: float


def _run(engine: Any, rng: random.Random, sizes: Sizes, batch: int, context: int, new_tokens: int) -> float:
    """Seconds of a batch of random prompts."""
    prompts = [[rng.randrange(10, sizes.vocabulary) for _ in range(context)] for _ in range(batch)]
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    async def all_at_once() -> None:
        # Not as one list: stock forgets a request of a list that has finished before the list is all sent.
        await asyncio.gather(*(engine.async_generate(input_ids=prompt, sampling_params=params) for prompt in prompts))

    began = time.perf_counter()
    engine.loop.run_until_complete(all_at_once())
    return time.perf_counter() - began


def pool_tokens(engine: Any) -> int:
    """Tokens that the engine's KV pool holds."""
    return int(engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])


def warm_up(engine: Any, sizes: Sizes) -> None:
    """Compile and capture what the measurements need."""
    rng = random.Random(1)
    for batch in (1, *sizes.batches):
        _run(engine, rng, sizes, batch, sizes.context, 4)


def speed(engine: Any, sizes: Sizes, batches: tuple[int, ...], context: int, seed: int) -> dict[str, Any]:
    """Milliseconds of a decode step and of a prefill for each batch size, all samples.

    A decode step is the difference of a run with `steps + 1` new tokens and the quickest with one, over `steps`.
    """
    rng = random.Random(seed)
    rows: dict[str, Any] = {}
    for batch in batches:
        prefills = [_run(engine, rng, sizes, batch, context, 1) for _ in range(sizes.repeats)]
        wholes = [_run(engine, rng, sizes, batch, context, sizes.steps + 1) for _ in range(sizes.repeats)]
        rows[str(batch)] = {
            "prefill_ms": [1e3 * seconds for seconds in prefills],
            "decode_ms": [1e3 * (seconds - min(prefills)) / sizes.steps for seconds in wholes],
        }
    return rows


def tokens(engine: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Greedy tokens of fixed prompts, one at a time: ids, log-probabilities, gap between the two likeliest."""
    rng = random.Random(3)
    results = []
    for length in sizes.token_prompts:
        prompt = [rng.randrange(10, sizes.vocabulary) for _ in range(length)]
        params = {"temperature": 0, "max_new_tokens": sizes.new_tokens, "ignore_eos": True}
        got = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, top_logprobs_num=2)
        info = got["meta_info"]
        results.append(
            {
                "ids": got["output_ids"],
                "logprobs": [token[0] for token in info["output_token_logprobs"]],
                "gaps": [first[0] - second[0] for first, second in info["output_top_logprobs"]],
            }
        )
    return results


def single_requests(engine: Any, sizes: Sizes, count: int) -> list[float]:
    """Milliseconds of requests of 16 tokens with one new token, one after the other."""
    rng = random.Random(5)
    return [1e3 * _run(engine, rng, sizes, 1, 16, 1) for _ in range(count)]
