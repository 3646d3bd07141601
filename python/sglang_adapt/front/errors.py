"""Bodies and headers of the errors that our layer answers itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_adapt.upstream.early_answers import EarlyAnswer

RETRY_AFTER_S = 1
"""What a 503 tells the client to wait: an engine is back in seconds, another replica at once."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not served.

    Attributes:
        status: HTTP status.
        code: stable machine-readable code, e.g. `no_engine`, `draining`.
        message: what happened and what to do.
        param: the field or header that is at fault.
        retry_after_s: when to come again, if another time than that of every 503.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @cached_property
    def flat(self) -> EarlyAnswer:
        """As it is told on sglang's routes. One refusal is told to many."""
        return _answer(self, self._fields)

    @cached_property
    def nested(self) -> EarlyAnswer:
        """As it is told on OpenAI's routes (`/v1/...`): under `error`."""
        return _answer(self, {"error": self._fields})

    def told(self, path: str) -> EarlyAnswer:
        """The one of both that is told on a route."""
        return self.nested if is_openai(path) else self.flat

    @property
    def _fields(self) -> dict[str, Any]:
        return {
            "object": "error",
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request"),
            "param": self.param,
            "code": self.code,
        }


def is_openai(path: str) -> bool:
    """Is it one of OpenAI's routes?"""
    return path.startswith("/v1/")


_TYPES = {503: "service_unavailable", 429: "rate_limit_exceeded"}


def _answer(refusal: Refusal, fields: dict[str, Any]) -> EarlyAnswer:
    """Every 503 says when to come again."""
    body = json.dumps(fields).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 503 or refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % (refusal.retry_after_s or RETRY_AFTER_S)))
    return EarlyAnswer(refusal.status, tuple(headers), body)
