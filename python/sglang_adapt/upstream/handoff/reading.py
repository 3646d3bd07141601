"""The source of what goes ahead of a hand-over: of prompts that are being read, it tells which there are, and of those
that are read in parts, which are done.

A prompt is told of once its first batch has been launched, so that there is room for it elsewhere when it has been
read; with what it found in the prefix cache. Parts are told when the results of a batch are processed: by then its KV
is there on this rank, and since all ranks give their blocks to rank 0 for the message, on all. What a request had when
the next part began is in the prefix cache, locked (or, without one, the request's own), so that its blocks hold it
until the request ends or is let go. With overlap scheduling that is all but the part that is being computed; without,
one part less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.core.handover import PartRead
from sglang_adapt.upstream.handoff.export import pages_of
from sglang_adapt.upstream.handoff.refusals import reason_to_stay
from sglang_adapt.upstream.patch import Patch

WORTH_TELLING = 256
"""Tokens of a prompt that is read at once from which on it is told of: it costs a call to another engine, and saves the
request one of its steps. Not on a CPU, where a batch that has been launched is computed already."""

TellPart = Callable[[Any, PartRead], None]
"""`tell(scheduler, part)`: on every rank, with the blocks of this rank alone."""

TellStaying = Callable[[Any, list[str]], None]


@dataclass
class _Prompt:
    """One that is being read.

    Attributes:
        given: tokens that the request had given when its prompt was begun; some, if it has lost an engine.
        is_told: of.
        told: tokens of it.
    """

    req: Any
    given: int
    is_told: bool = False
    told: int = 0


@dataclass
class _Reading:
    """This process's rank as a source.

    Attributes:
        tell: what is told of prompts and parts; None while nothing goes ahead.
        stays: what is told of requests that are not handed over.
        unit: tokens that are told at a time.
        prompts: the one that stock reads in parts, and those of which the last batch is in flight.
    """

    tell: TellPart | None = None
    stays: TellStaying | None = None
    unit: int = 0
    prompts: list[_Prompt] = field(default_factory=list)

    def noted(self, req: Any) -> _Prompt:
        """A prompt from its first batch on."""
        prompt = next((prompt for prompt in self.prompts if prompt.req is req), None)
        if prompt is None:
            prompt = _Prompt(req, len(req.output_ids))
            self.prompts.append(prompt)
        return prompt


_reading = _Reading()


def tell_parts(unit: int, tell: TellPart, stays: TellStaying) -> None:
    """From the next batch on tell which parts of prompts are done, in multiples of `unit` tokens."""
    _reading.tell, _reading.stays, _reading.unit = tell, stays, unit


def tell_no_parts() -> None:
    """Tell nothing any more; who was told knows."""
    _reading.tell = _reading.stays = None
    _reading.prompts.clear()


def launched(scheduler: Any, ending: Collection[Any]) -> None:
    """A batch has been launched; it reads prompts to their end, or a part of stock's `chunked_req`."""
    if _reading.tell is None:
        return
    chunked = scheduler.chunked_req
    in_flight = scheduler.enable_overlap and scheduler.device != "cpu"
    begun = [req for req in ending if in_flight and len(req.origin_input_ids) >= WORTH_TELLING]
    for req in begun if chunked is None else [*begun, chunked]:
        prompt = _reading.noted(req)
        if not prompt.is_told:
            _tell(scheduler, prompt)


def left(scheduler: Any, reqs: Collection[Any]) -> None:
    """Of those whose last batch has been launched, these are handed over; the others stay."""
    chunked = scheduler.chunked_req
    over = [prompt for prompt in _reading.prompts if prompt.req is not chunked]
    _reading.prompts = [prompt for prompt in _reading.prompts if prompt.req is chunked]
    gone = {id(req) for req in reqs}
    staying = [prompt.req.rid for prompt in over if prompt.is_told and id(prompt.req) not in gone]
    if staying and _reading.stays is not None:
        _reading.stays(scheduler, staying)


class PartsAreTold(Patch):
    """Tells what has been read of prompts when the results of a batch are in; stock tells of whole prompts.

    Source: sglang/srt/managers/scheduler.py, process_batch_result.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
        for prompt in _reading.prompts:
            # Of one that has its first token all is told at once, when it leaves.
            reads = len(prompt.req.output_ids) == prompt.given
            if prompt.is_told and reads and _done(prompt.req) > prompt.told:
                _tell(self, prompt)


def _done(req: Any) -> int:
    """Tokens of a prompt of which the KV is there, and stays where it is."""
    return len(req.prefix_indices) // _reading.unit * _reading.unit


def _tell(scheduler: Any, prompt: _Prompt) -> None:
    req = prompt.req
    if _reading.tell is None or not _goes_on(req):
        return
    first, done, size = prompt.told, _done(req), scheduler.page_size
    (pages,) = pages_of(scheduler, [req], [done])
    length = len(req.origin_input_ids) + len(req.output_ids) + 1
    most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    _reading.tell(scheduler, PartRead(req.rid, first, done, length, most, [pages[first // size :]]))
    prompt.is_told, prompt.told = True, done


def _goes_on(req: Any) -> bool:
    """It is there, will have more to give than its first token, and its state can be carried."""
    more = req.sampling_params.max_new_tokens > len(req.output_ids) + 1
    there = req.req_pool_idx is not None and req.to_finish is None and not req.finished()
    return more and there and reason_to_stay(req) is None


READING_PATCHES: tuple[type[Patch], ...] = (PartsAreTold,)
