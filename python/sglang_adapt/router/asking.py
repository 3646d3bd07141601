"""Calls to an engine's ranks in the messages of `core`, and their answers."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sglang_adapt.core.handoff import HandoffAnswer, HandoffCall, answer_of, call_payload, to_plain
from sglang_adapt.core.handover import HandoverAnswer, HandoverCall
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.router.pools import Pools

Answer = TypeVar("Answer", bound=HandoffAnswer)


async def ask_handoff(pools: Pools, spec: EngineSpec, call: HandoffCall, kind: type[Answer]) -> list[Answer]:
    """Ask an engine for a step of a switch; an answer of this kind from each rank. Raises EngineCallError."""
    answers = await pools.ask(spec, "handoff", call_payload(call))
    return [answer_of(answer, kind) for answer in answers]


async def ask_handover(pools: Pools, spec: EngineSpec, call: HandoverCall) -> list[HandoverAnswer]:
    """Ask an engine for a step of a hand-over; an answer from each rank. Raises EngineCallError."""
    answers = await pools.ask(spec, "handover", to_plain(call))
    return [msgspec.convert(answer, HandoverAnswer) for answer in answers]
