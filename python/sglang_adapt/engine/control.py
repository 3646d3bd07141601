"""What the router can ask of an engine's ranks: a table of functions by name.

A call reaches all ranks in the same iteration, between two batches. Each rank does it, or refuses with nothing
changed; rank 0 sends what all of them say as one reply. A function gets plain JSON values and returns them. What it
raises beside `REFUSALS` ends its rank, and with it the engine, which is started again: nobody knows what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.core.messages import EngineCall, RankAnswer
from sglang_adapt.engine import kv
from sglang_adapt.kv.adaptor import LeaseError

Handler = Callable[[Any, int, dict[str, Any]], dict[str, Any]]
"""`handler(scheduler, rank, payload)`: stock's scheduler and the rank within the engine."""

REFUSALS = (LeaseError,)
"""Errors that say that nothing has changed."""

HANDLERS: Mapping[str, Handler] = {
    "kv_grow": kv.grow,
    "kv_give_back": kv.give_back,
    "kv_state": kv.state,
}


@dataclass
class EngineControl:
    """The calls of one rank.

    Attributes:
        handlers: what can be asked.
        epoch: the highest epoch of a call so far.
    """

    handlers: Mapping[str, Handler] = field(default_factory=lambda: HANDLERS)
    epoch: int = 0

    def __call__(self, scheduler: Any, rank: int, call: EngineCall) -> RankAnswer:
        """Do what is asked, or say why not, with nothing changed."""
        if call.epoch < self.epoch:
            return _refusal(f"{call.name} of epoch {call.epoch} came after a call of epoch {self.epoch}; it is refused")
        handler = self.handlers.get(call.name)
        if handler is None:
            return _refusal(f"nothing is called {call.name!r}; there is {', '.join(self.handlers)}")
        self.epoch = call.epoch
        try:
            return RankAnswer(answer=handler(scheduler, rank, call.payload))
        except REFUSALS as error:
            return _refusal(f"{type(error).__name__}: {error}")


def _refusal(text: str) -> RankAnswer:
    return RankAnswer(error=text)
