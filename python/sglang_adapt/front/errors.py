"""Bodies and headers of the errors that our layer answers itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

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


_TYPES = {503: "service_unavailable", 429: "rate_limit_exceeded"}


@lru_cache(maxsize=1024)
def error_body(refusal: Refusal, openai: bool) -> bytes:
    """JSON body: flat on sglang's routes, nested under `error` on OpenAI's (`/v1/...`). One refusal is told to many."""
    fields = {
        "object": "error",
        "message": refusal.message,
        "type": _TYPES.get(refusal.status, "invalid_request"),
        "param": refusal.param,
        "code": refusal.code,
    }
    return json.dumps({"error": fields} if openai else fields).encode()
