"""A message that fails in an engine ends that message, not the engine.

Stock lets an exception in the handling of any message end the scheduler, with every request on it. Here a request
that fails so ends with a 500 that says why, and a control request (profile, expert distribution, ...) is answered
with a failure, which the front raises where the answer is waited for.

An engine of several ranks survives a control request only if it fails on every rank. A rank that fails alone may have
left the others waiting for it, so its engine is started again, and the router answers the request with a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from sglang_adapt.upstream import wire
from sglang_adapt.upstream.patch import Patch

VOTE_TIMEOUT_S = 5.0
"""How much later than the first rank another may fail on the same message."""

logger = logging.getLogger(__name__)


class ContainFailingMessages(Patch):
    """Puts a scheduler's handlers of messages behind one that answers for those that raise."""

    target = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any) -> None:
        ranks = self.server_args.tp_size
        agree = FailureVote(self.ps.tp_rank, ranks) if ranks > 1 else _alone
        self._request_dispatcher = Contained(self._request_dispatcher, agree)


class Contained:
    """Calls `handle(message)` and answers for it when it raises.

    Args:
        handle: stock's dispatcher; returns the answer to a message, or None.
        all_failed: tells, for the number of a control message that failed here, whether it failed on every rank.
    """

    def __init__(self, handle: Callable[[Any], Any], all_failed: Callable[[int], bool]) -> None:
        self._handle = handle
        self._all_failed = all_failed
        self._controls = 0
        self._reply_tags = wire.reply_tags()

    def __call__(self, message: Any) -> Any:
        tag = message.__struct_config__.tag.encode()
        if tag in self._reply_tags:
            # Every rank gets the same messages in the same order, so this numbers them alike.
            self._controls += 1
        try:
            return self._handle(message)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if tag in (wire.GENERATE, wire.EMBED):
                logger.exception("request %s failed when it was taken in", message.rid)
                return _ended(message.rid, f"the engine could not take the request in: {text}")
            if tag == wire.RPC_REQUEST and wire.call_of(message) is not None:
                # A call of the router's own: nobody knows what has changed.
                raise
            if tag not in self._reply_tags or not self._all_failed(self._controls):
                raise
            logger.exception("control request %s failed", tag.decode())
            return wire.control_failure(self._reply_tags[tag], text, 500)


class FailureVote:
    """Whether a control message failed on every rank of the engine; only ranks on which it failed take part.

    Votes through the store of the process group, not by a collective: the other ranks may be inside of one.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def __call__(self, number: int) -> bool:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        keys = [f"sglang_adapt/failed/{number}/{rank}" for rank in range(self._ranks)]
        store.set(keys[self._rank], b"failed")
        try:
            store.wait(keys, timedelta(seconds=VOTE_TIMEOUT_S))
        except DistStoreError:
            logger.error("control message %d failed on rank %d and not on every other", number, self._rank)
            return False
        return True


def _alone(number: int) -> bool:
    return True


def _ended(rid: str, message: str) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
    return AbortReq(rid=rid, finished_reason=reason)


@dataclass(frozen=True)
class ControlFailure:
    """Stands in a communicator where an answer was due."""

    message: str
    status_code: int


class DeliverControlFailures(Patch):
    """Hands a control request's failure to whoever waits for its answer; stock has no message for that."""

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any, recv_obj: Any) -> Any:
        if recv_obj.rid is None or not recv_obj.rid.startswith(wire.CONTROL_FAILED_PREFIX):
            return original(self, recv_obj)
        from sglang.srt.managers.communicator import FanOutCommunicator

        tag = recv_obj.rid.removeprefix(wire.CONTROL_FAILED_PREFIX)
        failure = ControlFailure(recv_obj.finished_reason["message"], recv_obj.finished_reason["status_code"])
        for kind, handler in self._result_dispatcher._mapping.items():
            waiting = getattr(handler, "__self__", None)
            if kind.__struct_config__.tag == tag and isinstance(waiting, FanOutCommunicator):
                waiting.handle_recv(failure)
                return None
        logger.error("%s was due, and failed: %s", tag, failure.message)
        return None


class RaiseControlFailures(Patch):
    """Raises a control request's failure, as an HTTP error with its text, where its answer is waited for."""

    target = "sglang.srt.managers.communicator.FanOutCommunicator.__call__"
    kind = "around"

    @staticmethod
    async def hook(original: Callable[..., Any], *args: Any) -> Any:
        from fastapi import HTTPException

        results = await original(*args)
        for result in results:
            if isinstance(result, ControlFailure):
                raise HTTPException(result.status_code, result.message)
        return results


FRONT_CONTAINMENT: tuple[type[Patch], ...] = (DeliverControlFailures, RaiseControlFailures)
