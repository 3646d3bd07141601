"""Tells the router which admitted request a tokenized one is.

The HTTP layer knows the tier of a request, stock's message to the engines does not, and none of its fields is ours
(`priority` orders, `extra_key` parts the prefix cache, `routing_key` picks engines, and all are the client's). So what
the router was asked waits in a context variable, which stock's handlers, being tasks of the request, see; a message of
our own with it goes out right before the request, on the same socket. It has all that the router needs, so it is good
however late it comes: stock may send requests of one call long after the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sglang_adapt.core.messages import AdmitRequest
from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.wire import encode_ticket


@dataclass(slots=True)
class Ticket:
    """An admitted request.

    Attributes:
        request: as the router was asked.
        used: something tokenized has gone out with it.
    """

    request: AdmitRequest
    used: bool = False


_TICKET: ContextVar[Ticket | None] = ContextVar("sglang_adapt_ticket", default=None)


@contextmanager
def ticket(request: AdmitRequest) -> Iterator[Ticket]:
    """Requests that stock sends to the engines in this context, and in tasks made in it, have this ticket."""
    made = Ticket(request)
    before = _TICKET.set(made)
    try:
        yield made
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
    found = _TICKET.get()
    if found is not None:
        found.used = True
        manager.send_to_scheduler.send(encode_ticket(tokenized.rid, found.request))


TICKETS: tuple[type[Patch], ...] = (TicketBeforeRequest, TicketsBeforeBatch)
