"""A message that fails in an engine ends that message, not the engine.

Stock lets an exception in the handling of any message end the scheduler, with every request on it. Here a request
that fails so ends with a 500 that says why, and a control request (profile, expert distribution, ...) is answered
with a failure, which the front raises where the answer is waited for.

An engine of several ranks does not survive a control request that fails: some of its ranks may have begun to talk to
one another. It is started again, and the router answers the request with a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_adapt.upstream import wire
from sglang_adapt.upstream.patch import Patch

logger = logging.getLogger(__name__)


class ContainFailingMessages(Patch):
    """Puts a scheduler's handlers of messages behind one that answers for those that raise."""

    target = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any) -> None:
        self._request_dispatcher = Contained(self._request_dispatcher, self.server_args.tp_size)


class Contained:
    """Calls `handle(message)` and answers for it when it raises.

    Args:
        handle: stock's dispatcher; returns the answer to a message, or None.
        tp_size: ranks of this engine.
    """

    def __init__(self, handle: Callable[[Any], Any], tp_size: int) -> None:
        self._handle = handle
        self._tp_size = tp_size
        self._reply_tags = wire.reply_tags()

    def __call__(self, message: Any) -> Any:
        try:
            return self._handle(message)
        except Exception as error:
            tag = message.__struct_config__.tag.encode()
            text = f"{type(error).__name__}: {error}"
            if tag in (wire.GENERATE, wire.EMBED):
                logger.exception("request %s failed when it was taken in", message.rid)
                return _ended(message.rid, f"the engine could not take the request in: {text}")
            if self._tp_size > 1 or tag not in self._reply_tags:
                raise
            logger.exception("control request %s failed", tag.decode())
            return wire.control_failure(self._reply_tags[tag], text, 500)


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
