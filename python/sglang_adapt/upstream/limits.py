"""Limits of an engine's iteration: prompt tokens, and requests that decode.

Stock has a chunk size and a bound of running requests, both of which are read anew for each batch. What it lacks is
that decoding goes on between two chunks: it computes prompts as long as there are any, however small the chunks.
Between the classes of requests stock's priorities decide (`CLASS_FLAGS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """The limits of this process's scheduler, and what it does without."""

    takes_turns: bool
    chunk: int | None
    most_prefill: int


_kept: _Kept | None = None


def set_limits(scheduler: Any, prefill_tokens: int | None, requests: int | None) -> None:
    """Limit the iterations of stock's scheduler from the next one on.

    Args:
        scheduler: the one of this process.
        prefill_tokens: of prompts before each decode step, a multiple of the page size; None: as stock does.
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
        _kept = _Kept(False, scheduler.chunked_prefill_size, scheduler.max_prefill_tokens)
    _kept.takes_turns = prefill_tokens is not None
    if _kept.chunk is None:
        # Without chunks a prompt is computed whole; the limit holds for how many are.
        scheduler.max_prefill_tokens = min(_kept.most_prefill, prefill_tokens or _kept.most_prefill)
    else:
        scheduler.chunked_prefill_size = min(_kept.chunk, prefill_tokens or _kept.chunk)
    get_context().override("sglang_adapt.limits", pp_max_micro_batch_size=requests or most)


class PromptsTakeTurns(Patch):
    """Lets a decode step follow each batch of prompts while there is a limit of prompts; stock goes on with prompts.

    A prompt that is read in chunks waits meanwhile as one that stock parks for want of room: its last chunk is cached,
    and nothing of it changes. All ranks of an engine decide alike, by batches and limits that they all have.

    Source: sglang/srt/managers/scheduler.py, get_next_batch_to_run.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
        from sglang.srt.managers.scheduler import NextBatchPlan

        last = self.last_batch
        if (
            _kept is not None
            and _kept.takes_turns
            and last is not None
            and last.forward_mode.is_extend()
            and not running_batch.is_prefill_only
            and any(not req.finished() for req in running_batch.reqs)
        ):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return original(self, running_batch)


LIMIT_PATCHES: tuple[type[Patch], ...] = (PromptsTakeTurns,)
