"""Tells the router which admitted request a tokenized one is.

The HTTP layer knows the tier of a request, stock's message to the engines does not, and none of its fields is ours
(`priority` orders, `extra_key` parts the prefix cache, `routing_key` picks engines, and all are the client's). So the
number under which the request was admitted waits in a context variable, which stock's handlers, being tasks of the
request, see; a message of our own with it goes out right before the request, on the same socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.wire import encode_ticket

_TICKET: ContextVar[int | None] = ContextVar("sglang_adapt_ticket", default=None)


@contextmanager
def ticket(number: int) -> Iterator[None]:
    """Requests that stock sends to the engines in this context, and in tasks made in it, have this ticket."""
    before = _TICKET.set(number)
    try:
        yield
    finally:
        _TICKET.reset(before)


class TicketBeforeRequest(Patch):
    """Sends the ticket of a request before the request itself; stock sends each request by this method."""

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"
    kind = "before"

    @staticmethod
    def hook(self: Any, tokenized_obj: Any) -> None:
        _send(self, tokenized_obj)


class TicketsBeforeBatch(Patch):
    """The same where stock sends the requests of a batch as one message."""

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_batch_request"
    kind = "before"

    @staticmethod
    def hook(self: Any, tokenized_objs: list[Any]) -> None:
        for tokenized in tokenized_objs:
            _send(self, tokenized)


def _send(manager: Any, tokenized: Any) -> None:
    number = _TICKET.get()
    if number is not None:
        manager.send_to_scheduler.send(encode_ticket(tokenized.rid, number))


TICKETS: tuple[type[Patch], ...] = (TicketBeforeRequest, TicketsBeforeBatch)
