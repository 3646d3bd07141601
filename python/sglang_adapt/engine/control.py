"""What the router can ask of an engine's ranks: a table of functions by name.

A call reaches all ranks in the same iteration, between two batches. Each rank does it, or refuses with nothing
changed; rank 0 sends what all of them say as one reply. A function gets plain values and bytes, and returns such. If it
raises anything but `REFUSALS` its rank ends, and with it the engine, which is started again: nobody knows what has
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import msgspec

from sglang_adapt.core import handover
from sglang_adapt.core.handoff import answer_payload, call_of, to_plain
from sglang_adapt.core.messages import EngineCall, RankAnswer
from sglang_adapt.engine import kv
from sglang_adapt.engine.copying import CopyRefusedError, KvCopies, handles_of
from sglang_adapt.engine.handoff import EngineHandoff, StaleHandoffError
from sglang_adapt.engine.handover import EngineHandover
from sglang_adapt.engine.limits import limit
from sglang_adapt.engine.reload import reload_weights
from sglang_adapt.engine.sequence import sequence
from sglang_adapt.kv.adaptor import LeaseError
from sglang_adapt.kv.plan import PlanError
from sglang_adapt.memory import SharedMemoryError
from sglang_adapt.upstream.handoff import REFUSALS as HANDOFF_REFUSALS
from sglang_adapt.upstream.handoff import recover as recovery
from sglang_adapt.upstream.kv_pool import EnginePool
from sglang_adapt.upstream.limits import LimitsError
from sglang_adapt.upstream.sequence.mode import SequenceModeError
from sglang_adapt.upstream.weights.again import NotReadError

Handler = Callable[[Any, int, dict[str, Any]], dict[str, Any]]
"""`handler(scheduler, rank, payload)`: stock's scheduler and the rank within the engine."""

REFUSALS = (
    LeaseError,
    LimitsError,
    SequenceModeError,
    StaleHandoffError,
    CopyRefusedError,
    PlanError,
    NotReadError,
    SharedMemoryError,
    msgspec.ValidationError,
    *HANDOFF_REFUSALS,
)
"""Errors that say that nothing has changed."""


def recover(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Go on with requests whose engine has died.

    Args:
        payload: `requests`: for each its stock `message`, as bytes, and its `output_ids` so far.

    Returns:
        `taken`: how many wait now; stock has answered the others.
    """
    taken = sum(
        recovery.recover(scheduler, request["message"], request["output_ids"]) for request in payload["requests"]
    )
    return {"taken": taken}


HANDLERS: Mapping[str, Handler] = {
    "recover": recover,
    "limits": limit,
    "kv_grow": kv.grow,
    "kv_give_back": kv.give_back,
    "kv_state": kv.state,
    "sequence": sequence,
    "reload_weights": reload_weights,
}


class EngineControl:
    """The calls of one rank.

    Attributes:
        handlers: what can be asked.
        page_copies: KV arrives with a copy for each page and plane.
        epoch: the highest epoch of a call so far.
    """

    def __init__(self, handlers: Mapping[str, Handler] = HANDLERS, *, page_copies: bool = False) -> None:
        self.handlers = dict(handlers)
        self.page_copies = page_copies
        self.epoch = 0

    def started(self, scheduler: Any, rank: int, pool: EnginePool, gpus: tuple[int, ...]) -> None:
        """The scheduler is built, on a shared pool: requests can move from here on, by `handoff`, `handover`
        and `kv_map`.

        Args:
            gpus: the deployment's GPUs of the engine's ranks.

        Raises:
            HandoffUnsupportedError, UnknownReqStateError, PatchError: see `EngineHandoff`.
        """
        copies = KvCopies(pool.engine, pool.geometry, gpus, rank, pool.region, by_page=self.page_copies)
        handoff = EngineHandoff(scheduler, copies.start)
        handing = EngineHandover(scheduler, copies)

        def move(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
            return answer_payload(handoff.answer(call_of(payload)))

        def hand_over(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
            return to_plain(handing.answer(msgspec.convert(payload, handover.HandoverCall)))

        def map_regions(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
            copies.map(handles_of(payload["regions"]))
            return {}

        self.handlers |= {"handoff": move, "handover": hand_over, "kv_map": map_regions}

    def __call__(self, scheduler: Any, rank: int, call: EngineCall) -> RankAnswer:
        """Do what is asked, or say why not, with nothing changed."""
        if call.epoch < self.epoch:
            return _refusal(f"{call.name} of epoch {call.epoch} came after a call of epoch {self.epoch}; it is refused")
        handler = self.handlers.get(call.name)
        if handler is None:
            return _refusal(f"nothing is called {call.name!r}; there is {', '.join(self.handlers)}")
        self.epoch = call.epoch
        began = monotonic()
        try:
            answer = handler(scheduler, rank, call.payload)
        except REFUSALS as error:
            return _refusal(f"{type(error).__name__}: {error}")
        return RankAnswer(answer=answer, began_s=began, ended_s=monotonic())


def _refusal(text: str) -> RankAnswer:
    return RankAnswer(error=text)
