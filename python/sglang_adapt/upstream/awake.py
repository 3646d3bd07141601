"""An idle engine that has been told that requests come does not go to sleep before they do.

A process that has slept for some milliseconds runs the same code at a third to a half of its speed: its core was
slowed down or given to others, and its caches are cold. What is said ahead of a switch or a hand-over comes
milliseconds before the call that requests wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from sglang_adapt.upstream.patch import Patch

AWAKE_S = 0.2
"""How long an engine stays awake: a prompt of 8,000 tokens may be read meanwhile."""

_LOOK_S = 0.0005
"""How long rank 0 looks for messages before the engine has another idle turn, which keeps its other ranks awake too."""

_until_s = 0.0


_reasons: list[Callable[[], bool]] = []


def awake_while(reason: Callable[[], bool]) -> Callable[[], bool]:
    """An engine has another turn at once while this holds, also on a CPU, instead of sleeping until a message comes."""
    _reasons.append(reason)
    return reason


def stay_awake(scheduler: Any) -> None:
    """Look for messages without sleeping for a while. Not on a CPU, where engines share the cores that compute."""
    global _until_s
    if scheduler.device != "cpu":
        _until_s = monotonic() + AWAKE_S


class StaysAwake(Patch):
    """Lets an idle engine that expects a message go on looking for it; stock sleeps until one comes.

    Source: sglang/srt/managers/scheduler.py, maybe_sleep_on_idle.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., None], self: Any) -> None:
        if any(reason() for reason in _reasons):
            return
        now_s = monotonic()
        if self.idle_sleeper is None or now_s >= _until_s:
            original(self)
            return
        while monotonic() < now_s + _LOOK_S and not self.idle_sleeper.poller.poll(0):
            pass
