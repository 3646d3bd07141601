"""What is done before each batch of an engine: one patch, and the steps that want their turn there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adapt.upstream.patch import Patch

Step = Callable[[Any], bool]
"""`step(scheduler)`, on all ranks in the same iteration; True if it has changed the scheduler's batches."""

_steps: list[Step] = []


def before_each_batch(step: Step) -> Step:
    """Give a step its turn, after those that have one already."""
    _steps.append(step)
    return step


class BeforeEachBatch(Patch):
    """Lets steps of ours run between the messages of an iteration and the choice of its batch; stock has no such place.

    Stock hands the batches over as arguments, so those that a step has changed replace them.

    Source: sglang/srt/managers/scheduler.py, the event loops.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
    kind = "before"

    @staticmethod
    def hook(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
        changed = [step(self) for step in _steps]
        if not any(changed):
            return None
        return (self,), {"running_batch": self.running_batch, "last_batch": self.last_batch}


ITERATION_PATCHES: tuple[type[Patch], ...] = (BeforeEachBatch,)
