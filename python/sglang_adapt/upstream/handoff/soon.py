"""The source of a move, shortly before it: an engine that will be asked for its requests in a moment looks for messages
when a batch has ended, not when the next one has begun.

With overlap scheduling stock looks for messages while a batch is computed. A call that comes during one batch is seen
when the next one is under way, and whoever needs things at rest waits for that one as well: one and a half batches in
the mean. Here the results of each batch are processed before messages are looked for, so a call waits for half a batch.
That costs each of these batches the overlap with the scheduling of the next one, so it is done for a few batches only:
counted, because all ranks must do the same.
"""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.handoff.quiesce import drain
from sglang_adapt.upstream.patch import Patch

MOST_BATCHES = 64
"""After so many the call is not waited for any more."""


class _Soon:
    """What this process's rank expects.

    Attributes:
        scheduler: stock's.
        batches: that are still waited for before messages are looked for.
    """

    scheduler: Any = None
    batches = 0


_soon = _Soon()


def expect_export(scheduler: Any) -> None:
    """Requests will be asked for soon."""
    _soon.scheduler, _soon.batches = scheduler, MOST_BATCHES


def expect_nothing() -> None:
    """They have been, or will not be."""
    _soon.batches = 0


class LooksBetweenBatches(Patch):
    """Ends the batch in flight before messages are looked for, while an export is expected; stock looks meanwhile.

    Source: sglang/srt/managers/scheduler.py, event_loop_overlap.
    """

    target = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests"
    kind = "before"

    @staticmethod
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        if _soon.batches and _soon.scheduler.enable_overlap and _soon.scheduler.last_batch is not None:
            _soon.batches -= 1
            drain(_soon.scheduler)


SOON_PATCHES: tuple[type[Patch], ...] = (LooksBetweenBatches,)
