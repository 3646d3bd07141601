"""Tells a client which tier its request was of: in a header, and in the body where OpenAI's API has `service_tier`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TIER_IN_BODY = frozenset(("/v1/chat/completions", "/v1/responses"))
"""Routes whose answers have the field. Of a stream only the chunks of chat completions have it at their top."""
_CHUNK = b'data: {"id":'
"""How a chunk of a chat completion begins; quotes inside of JSON strings are escaped, so nothing else reads like it."""


def tier_told(send: Send, tier: str, in_body: bool) -> Send:
    """A `send` of ASGI that adds the tier to what passes.

    Args:
        send: the next one.
        tier: its name, of letters, digits, `-` and `_`.
        in_body: add `service_tier` to the JSON of a 200, too.
    """
    field = b'"service_tier":"%s",' % tier.encode()
    adds, streams = False, False

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        nonlocal adds, streams
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            found = in_body and message["status"] == 200
            streams = found and kind.startswith(b"text/event-stream")
            adds = found and kind.startswith(b"application/json")
            if adds:
                headers = [(name, _longer(name, value, len(field))) for name, value in headers]
            message = {**message, "headers": [*headers, (b"x-adapt-tier", tier.encode())]}
        elif streams and _CHUNK in message.get("body", b""):
            message = {
                **message,
                "body": message["body"].replace(_CHUNK, b"data: {" + field + _CHUNK[len("data: {") :]),
            }
        elif adds and message.get("body"):
            # The object has other fields: an answer is never empty.
            message = {**message, "body": b"{" + field + message["body"].removeprefix(b"{")}
            adds = False
        await send(message)

    return wrapped


def _longer(name: bytes, value: bytes, by: int) -> bytes:
    return str(int(value) + by).encode() if name.lower() == b"content-length" else value
