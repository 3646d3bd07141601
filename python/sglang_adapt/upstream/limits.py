"""Limits of an engine's iteration: prompt tokens, and requests that decode.

Stock has a chunk size and a bound of running requests, both of which are read anew for each batch. What it lacks is
that decoding goes on between two chunks: it computes prompts as long as there are any, however small the chunks.
Between the classes of requests stock's priorities decide (`CLASS_FLAGS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_adapt.policy.limits import STEPS
from sglang_adapt.upstream.patch import Patch

FEASIBLE, BEST_EFFORT, BACKGROUND = 2, 1, 0
"""Stock's `priority` of the three classes. A request preempts what is more than `_THRESHOLD` below it."""
_THRESHOLD = 1

CLASS_FLAGS = (
    "--enable-priority-scheduling",
    "--default-priority-value",
    str(FEASIBLE),
    "--priority-scheduling-preemption-threshold",
    str(_THRESHOLD),
    "--retraction-policy",
    "priority",
)
"""Of stock's command line: the queue is in order of class and then of arrival, feasible requests preempt background
work (which is computed again later, but for what its prompt has in the prefix cache), and if KV runs out the lowest
class is retracted first."""


class LimitsError(ValueError):
    """Limits that an engine cannot keep; the text says what it can. Nothing has changed."""


@dataclass(slots=True)
class _Kept:
    """The limit of prompts of this process's scheduler, what it does without, and decode steps that are due."""

    chunk: int | None
    most_prefill: int
    limit: int | None = None
    owed: int = 0


_kept: _Kept | None = None


def set_limits(scheduler: Any, prefill_tokens: int | None, requests: int | None) -> None:
    """Limit the iterations of stock's scheduler from the next one on.

    Args:
        scheduler: the one of this process.
        prefill_tokens: of prompts for each `STEPS` decode steps, a multiple of the page size; None: as stock does.
        requests: that decode; those that run go on. None: as stock does.

    Raises:
        LimitsError: a value that cannot be.
    """
    global _kept
    from sglang.srt.runtime_context import get_context

    if prefill_tokens is not None and (prefill_tokens < 1 or prefill_tokens % scheduler.page_size):
        raise LimitsError(f"{prefill_tokens} prompt tokens are no multiple of a page, which has {scheduler.page_size}")
    most = scheduler.max_running_requests
    if requests is not None and not 1 <= requests <= most:
        raise LimitsError(f"{requests} requests cannot be the limit of an engine that runs 1 to {most}")
    if _kept is None:
        _kept = _Kept(scheduler.chunked_prefill_size, scheduler.max_prefill_tokens)
    _kept.limit = prefill_tokens
    if _kept.chunk is None:
        # Without chunks a prompt is computed whole; the limit holds for how many are.
        scheduler.max_prefill_tokens = min(_kept.most_prefill, prefill_tokens or _kept.most_prefill)
    else:
        scheduler.chunked_prefill_size = min(_kept.chunk, prefill_tokens or _kept.chunk)
    get_context().override("sglang_adapt.limits", pp_max_micro_batch_size=requests or most)


class PromptsTakeTurns(Patch):
    """Lets decode steps follow each batch of prompts while there is a limit of prompts; stock goes on with prompts.

    As many of `STEPS` as the batch has of the limit. A prompt that is read in chunks waits meanwhile as one that stock
    parks for want of room: its last chunk is cached, and nothing of it changes. All ranks of an engine decide alike, by
    batches and limits that they all have.

    Source: sglang/srt/managers/scheduler.py, get_next_batch_to_run.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
        from sglang.srt.managers.scheduler import NextBatchPlan

        kept = _kept
        if kept is None or kept.limit is None:
            return original(self, running_batch)
        decodes = not running_batch.is_prefill_only and any(not req.finished() for req in running_batch.reqs)
        if kept.owed and decodes:
            kept.owed -= 1
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan = original(self, running_batch)
        batch = plan.batch_to_run
        kept.owed = 0 if batch is None else min(STEPS, math.ceil(STEPS * batch.extend_num_tokens / kept.limit))
        return plan


LIMIT_PATCHES: tuple[type[Patch], ...] = (PromptsTakeTurns,)
