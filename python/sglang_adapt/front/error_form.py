"""Gives errors of stock's routes the one form that ours have, and to those before a stream's first token a status.

Stock has four forms: `{"error": {"message"}}`, flat with a number as code, `{"detail"}`, and, where a stream is asked
for on `/generate`, a 200 whose only event is the error. Here a stream's answer begins with its first event, as stock
itself has it on OpenAI's routes, so a request that is refused gets its 400. Anthropic's and Ollama's keep their form.
Errors of our own routes have it already; only FastAPI answers some below them, too (404, 405).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_adapt.front.errors import Refusal, is_openai
from sglang_adapt.upstream.stock_refusals import explained

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_OTHERS = ("/v1/messages", "/api/")
"""Routes with forms of their own."""
_EVENT = b"data: "


def has_form(path: str) -> bool:
    """Do errors of a route come in the form that is told in the docs?"""
    return not path.startswith(_OTHERS)


def formed(send: Send, path: str) -> Send:
    """A `send` of ASGI for stock's answers to a route; the same one where errors keep their form.

    Args:
        send: the next one.
        path: of the request.
    """
    if not has_form(path):
        return send
    start: Message | None = None
    read = bytearray()
    fails = streams = over = False

    async def wrapped(message: Message) -> None:
        nonlocal start, fails, streams, over
        if over:
            return
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            fails = message["status"] >= 400 and kind.startswith(b"application/json")
            streams = message["status"] == 200 and kind.startswith(b"text/event-stream")
            start = message
            if not fails and not streams:
                await send(message)
            return
        if start is None or not (fails or streams):
            await send(message)
            return
        read.extend(message.get("body", b""))
        if fails:
            if not message.get("more_body", False):
                if _is_ours(bytes(read)):
                    await send(start)
                    await send({"type": "http.response.body", "body": bytes(read)})
                else:
                    await _answer(send, start, start["status"], fields_of(bytes(read)), path)
            return
        if not read and message.get("more_body", False):
            return
        failed = early_error(bytes(read))
        if failed is not None:
            over = True
            status, fields = failed
            await _answer(send, start, status, fields, path)
            return
        streams = False
        await send(start)
        await send(message)

    return wrapped


def _is_ours(body: bytes) -> bool:
    """Has an error the one form already? Only then is its code a word."""
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("object") == "error" and isinstance(said.get("code"), str)


def fields_of(body: bytes) -> dict[str, Any]:
    """message, type, param and code of an error, whichever of stock's forms it has."""
    try:
        said = json.loads(body)
    except ValueError:
        return {"message": body.decode("utf-8", "replace")}
    if isinstance(said, dict):
        inner = said.get("error", said.get("detail", said))
        said = inner if isinstance(inner, dict) else {"message": inner}
    return said if isinstance(said, dict) and "message" in said else {"message": str(said)}


def early_error(events: bytes) -> tuple[int, dict[str, Any]] | None:
    """(status, fields) if the first of these events ends the request with an error before any token, or None."""
    first = events.split(b"\n\n", 1)[0]
    if not first.startswith(_EVENT) or not (b'"error"' in first or b'"abort"' in first):
        return None
    try:
        said = json.loads(first.removeprefix(_EVENT))
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    fields = said.get("error")
    if isinstance(fields, dict) and "message" in fields:
        code = fields.get("code")
        return (code if type(code) is int and 400 <= code < 600 else 400), fields
    # What ends in an engine before its first token comes as its first and last output.
    meta = said.get("meta_info")
    ended = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(ended, dict) and ended.get("type") == "abort" and type(ended.get("status_code")) is int:
        return ended["status_code"], {"message": ended.get("message"), "type": ended.get("err_type")}
    return None


async def _answer(send: Send, start: Message, status: int, fields: dict[str, Any], path: str) -> None:
    body = body_of(status, fields, path)
    kept = [
        (name, value) for name, value in start["headers"] if name.lower() not in (b"content-length", b"content-type")
    ]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({**start, "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def body_of(status: int, fields: dict[str, Any], path: str) -> bytes:
    """The body of an error in the one form.

    Args:
        status: HTTP status.
        fields: message, and where stock has them type, param and code.
        path: of the request.
    """
    message, param, code = str(fields["message"]), fields.get("param"), fields.get("code")
    if status == 400:
        if param is None:
            param, message = explained(message, path)
        if isinstance(code, str):
            return Refusal(status, code, message, param).told(path).body
        if param is None:
            return Refusal(400, "bad_request", message).told(path).body
        return Refusal(400, "bad_parameter", message, param).told(path).body
    said = {
        "object": "error",
        "message": message,
        "type": str(fields.get("type") or status),
        "param": param,
        "code": status if code is None else code,
    }
    return json.dumps({"error": said} if is_openai(path) else said).encode()
