"""Bodies and headers of the errors that our layer answers itself."""

from __future__ import annotations

import json
from dataclasses import dataclass

RETRY_AFTER_S = 1
"""What a 503 tells the client to wait: an engine is back in seconds, another replica at once."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not served.

    Attributes:
        status: HTTP status.
        code: stable machine-readable code, e.g. `no_engine`, `draining`.
        message: what happened and what to do.
    """

    status: int
    code: str
    message: str


def error_body(refusal: Refusal, openai: bool) -> bytes:
    """JSON body: flat on sglang's routes, nested under `error` on OpenAI's (`/v1/...`)."""
    fields = {
        "object": "error",
        "message": refusal.message,
        "type": "service_unavailable" if refusal.status == 503 else "invalid_request",
        "param": None,
        "code": refusal.code,
    }
    return json.dumps({"error": fields} if openai else fields).encode()
