"""The source of what goes ahead of a hand-over: of a prompt that is read in parts, it tells which are done.

Told when the results of a batch are processed: by then its KV is there on this rank, and since all ranks give their
blocks to rank 0 for the message, on all. What a request had when the next part began is in the prefix cache, locked
(or, without one, the request's own), so that its blocks hold it until the request ends or is let go. With overlap
scheduling that is all but the part that is being computed; without, one part less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.core.handover import PartRead
from sglang_adapt.upstream.handoff import leave
from sglang_adapt.upstream.handoff.export import pages_of
from sglang_adapt.upstream.handoff.iteration import before_each_batch
from sglang_adapt.upstream.handoff.refusals import reason_to_stay
from sglang_adapt.upstream.patch import Patch

TellPart = Callable[[Any, PartRead], None]
"""`tell(scheduler, part)`: on every rank, with the blocks of this rank alone."""

TellStaying = Callable[[Any, list[str]], None]


@dataclass
class _Prompt:
    """One that is read in parts, or was just now.

    Attributes:
        told: tokens of it.
    """

    req: Any
    told: int = 0


@dataclass
class _Reading:
    """This process's rank as a source.

    Attributes:
        tell: what is told of parts; None while nothing goes ahead.
        stays: what is told of requests that are not handed over.
        unit: tokens that are told at a time.
        prompts: the one that stock reads in parts, and one of which the last part is in flight.
    """

    tell: TellPart | None = None
    stays: TellStaying | None = None
    unit: int = 0
    prompts: list[_Prompt] = field(default_factory=list)


_reading = _Reading()


def tell_parts(unit: int, tell: TellPart, stays: TellStaying) -> None:
    """From the next batch on tell which parts of prompts are done, in multiples of `unit` tokens."""
    _reading.tell, _reading.stays, _reading.unit = tell, stays, unit


def tell_no_parts() -> None:
    """Tell nothing any more; who was told knows."""
    _reading.tell = _reading.stays = None
    _reading.prompts.clear()


@before_each_batch
def note(scheduler: Any) -> bool:
    """Note what is read in parts, and tell of what is not handed over; after `leave` has had its turn."""
    if _reading.stays is None:
        return False
    chunked = scheduler.chunked_req
    over = [prompt for prompt in _reading.prompts if prompt.req is not chunked]
    _reading.prompts = [prompt for prompt in _reading.prompts if prompt.req is chunked]
    staying = [prompt.req.rid for prompt in over if prompt.told and not leave.holds(prompt.req)]
    if staying:
        _reading.stays(scheduler, staying)
    if chunked is not None and not _reading.prompts:
        _reading.prompts.append(_Prompt(chunked))
    return False


class PartsAreTold(Patch):
    """Tells what has been read of prompts when the results of a batch are in; stock tells of whole prompts.

    Source: sglang/srt/managers/scheduler.py, process_batch_result.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
        if _reading.tell is not None:
            for prompt in _reading.prompts:
                _tell(self, prompt)


def _tell(scheduler: Any, prompt: _Prompt) -> None:
    req = prompt.req
    done = len(req.prefix_indices) // _reading.unit * _reading.unit
    if done <= prompt.told or not _goes_on(req):
        return
    first, size = prompt.told, scheduler.page_size
    (pages,) = pages_of(scheduler, [req], [done])
    length = len(req.origin_input_ids) + len(req.output_ids) + 1
    most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    assert _reading.tell is not None
    _reading.tell(scheduler, PartRead(req.rid, first, done, length, most, [pages[first // size :]]))
    prompt.told = done


def _goes_on(req: Any) -> bool:
    """It is there, will have more to give than its first token, and its state can be carried."""
    more = req.sampling_params.max_new_tokens > len(req.output_ids) + 1
    there = req.req_pool_idx is not None and req.to_finish is None and not req.finished()
    return more and there and reason_to_stay(req) is None


READING_PATCHES: tuple[type[Patch], ...] = (PartsAreTold,)
