"""Bringing a stock scheduler to rest inside its dispatcher, and taking its requests out of it.

As stock's `pause_generation("retract")` (sglang/srt/managers/scheduler.py) does, but requests keep their KV. At the
dispatcher at most one batch is in flight; after its results nothing runs, and what was running can be moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NoRoomError(RuntimeError):
    """A request cannot go back to where it was; the text names it and what is in its place. Nothing has changed."""


@dataclass(frozen=True)
class Taken:
    """Requests of one engine's rank that are out of its batches and queues; slots, KV and cache locks are kept.

    Attributes:
        running: have given a token.
        prefilling: the one whose prompt is being read in chunks, or None.
        waiting: the waiting queue, in order.
        compiling: those that wait for their grammar.
    """

    running: tuple[Any, ...]
    prefilling: Any | None
    waiting: tuple[Any, ...]
    compiling: tuple[Any, ...]

    @property
    def with_kv(self) -> tuple[Any, ...]:
        return self.running if self.prefilling is None else (*self.running, self.prefilling)

    @property
    def all(self) -> tuple[Any, ...]:
        return (*self.with_kv, *self.waiting, *self.compiling)


def requests_of(scheduler: Any) -> list[Any]:
    """All unfinished requests that a scheduler has, each once."""
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    queues = [scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue]
    every = {id(req): req for reqs in (*batches, chunked, *queues) for req in reqs}
    return [req for req in every.values() if not req.finished()]


def drain(scheduler: Any) -> None:
    """Process the results of the batch in flight and settle what stock would settle before its next batch."""
    if scheduler.enable_overlap and scheduler.last_batch:
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
    _synchronise(scheduler)
    scheduler.process_pending_chunked_abort()
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend():
        chunked = scheduler.chunked_req
        last.filter_batch(chunked_req_to_exclude=[req for req in (chunked, last.chunked_req) if req is not None])
        if not last.is_empty():
            if scheduler.running_batch.is_empty():
                scheduler.running_batch = last
            else:
                scheduler.running_batch.merge_batch(last)
    scheduler.running_batch.filter_batch()
    scheduler.running_batch.batch_is_full = False
    scheduler.last_batch = None
    scheduler.cur_batch_for_debug = None


def take(scheduler: Any, wanted: Callable[[Any], bool]) -> Taken:
    """Take the wanted requests out of a drained scheduler; the rest goes on."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = scheduler.running_batch
    running = tuple(req for req in batch.reqs if wanted(req))
    if len(running) == len(batch.reqs):
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    else:
        batch.filter_batch(keep_indices=[index for index, req in enumerate(batch.reqs) if not wanted(req)])
    prefilling = scheduler.chunked_req
    if prefilling is not None and wanted(prefilling):
        scheduler.chunked_req = None
    else:
        prefilling = None
    waiting = tuple(filter(wanted, scheduler.waiting_queue))
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if not wanted(req)]
    grammars = scheduler.grammar_manager
    compiling = tuple(filter(wanted, grammars.grammar_queue))
    grammars.grammar_queue = [req for req in grammars.grammar_queue if not wanted(req)]
    return Taken(running, prefilling, waiting, compiling)


def check_room(scheduler: Any, taken: Taken) -> None:
    """Check that `put_back` can follow.

    Raises:
        NoRoomError: another prompt is being read in chunks meanwhile.
    """
    if taken.prefilling is not None and scheduler.chunked_req is not None:
        raise NoRoomError(
            f"request {taken.prefilling.rid} cannot go on: the prompt of {scheduler.chunked_req.rid} is being read in "
            f"its place; send an engine no requests while its own are held, and restore when that one is done"
        )


def put_back(scheduler: Any, taken: Taken) -> None:
    """Undo `take`, after `check_room`: the requests go on where they were."""
    from sglang_adapt.upstream.handoff.batch import join_running

    if taken.prefilling is not None:
        scheduler.chunked_req = taken.prefilling
    join_running(scheduler, taken.running)
    scheduler.waiting_queue = [*taken.waiting, *scheduler.waiting_queue]
    grammars = scheduler.grammar_manager
    grammars.grammar_queue = [*taken.compiling, *grammars.grammar_queue]


def _synchronise(scheduler: Any) -> None:
    """Wait until the device has done all that was launched: nothing writes KV any more."""
    if scheduler.device != "cpu":
        scheduler.forward_stream.synchronize()
        scheduler.copy_stream.synchronize()
