"""Errors of stock's come in one form, and with a status if no token has come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_adapt.front.error_form import early_error, formed, has_form

JSON = [(b"content-type", b"application/json"), (b"content-length", b"7"), (b"x-kept", b"1")]
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
NAMED = "temperature must be a number, got 'hot'."


def passed(path: str, status: int, headers: Any, *parts: bytes) -> list[dict[str, Any]]:
    """What a client gets of an answer of stock's in these parts."""
    sent: list[Any] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        wrapped = formed(send, path)
        await wrapped({"type": "http.response.start", "status": status, "headers": headers})
        for at, part in enumerate(parts):
            more = at < len(parts) - 1
            await wrapped({"type": "http.response.body", "body": part, "more_body": more})

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": NAMED}},
        {"error": NAMED},
        {"detail": NAMED},
        {"object": "error", "message": NAMED, "type": "BadRequest", "param": None, "code": 400},
        {"error": {"object": "error", "message": NAMED, "param": None, "code": 400}},
    ],
)
def test_a_400_has_one_form(path: str, said: dict[str, Any]) -> None:
    body = json.dumps(said).encode()
    start, end = passed(path, 400, JSON, body[:9], body[9:])
    assert start["status"] == 400
    headers = dict(start["headers"])
    assert (headers[b"content-length"], headers[b"x-kept"]) == (str(len(end["body"])).encode(), b"1")
    fields = json.loads(end["body"])
    assert ("error" in fields) == path.startswith("/v1/")
    assert fields.get("error", fields) == {
        "object": "error",
        "message": NAMED,
        "type": "invalid_request",
        "param": "temperature",
        "code": "bad_parameter",
    }


def test_a_400_about_nothing_that_is_known_has_no_param() -> None:
    fields = json.loads(passed("/generate", 400, JSON, b'{"detail": "No."}')[1]["body"])
    assert (fields["param"], fields["code"], fields["message"]) == (None, "bad_request", "No.")


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b"5", b'{"a": 1}'])
def test_any_body_becomes_an_error(body: bytes) -> None:
    fields = json.loads(passed("/generate", 500, JSON, body)[1]["body"])
    assert (fields["object"], fields["code"]) == ("error", 500)


@pytest.mark.parametrize(
    ("event", "status", "param"),
    [
        ({"error": {"message": NAMED, "code": 400}}, 400, "temperature"),
        ({"error": {"message": "engine tp1@0 is down", "code": 503}}, 503, None),
        (
            {
                "meta_info": {
                    "finish_reason": {"type": "abort", "message": "is down", "status_code": 503, "err_type": "x"}
                }
            },
            503,
            None,
        ),
    ],
)
def test_an_error_before_the_first_token_has_its_status(event: Any, status: int, param: str | None) -> None:
    event = b"data: " + json.dumps(event).encode() + b"\n\n"
    sent = passed("/generate", 200, STREAM, event, b"data: [DONE]\n\n", b"")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == status
    assert dict(sent[0]["headers"])[b"content-type"] == b"application/json"
    assert json.loads(sent[1]["body"])["param"] == param


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"text": "\\"error\\" \\"abort\\"", "meta_info": {"finish_reason": null}}\n\n',
        b'data: {"text": "a", "meta_info": {"finish_reason": {"type": "abort", "status_code": null}}}\n\n',
        b"data: [DONE]\n\n",
        b'data: {"error": broken\n\n',
        b": ping\n\n",
    ],
)
def test_other_streams_pass_as_they_are(event: bytes) -> None:
    parts = (event, b'data: {"error": {"message": "later", "code": 503}}\n\n', b"")
    sent = passed("/generate", 200, STREAM, *parts)
    assert early_error(event) is None
    assert [message.get("body") for message in sent[1:]] == list(parts)
    assert sent[0] == {"type": "http.response.start", "status": 200, "headers": STREAM}


def test_a_stream_without_events_passes() -> None:
    assert [message["type"] for message in passed("/generate", 200, STREAM, b"")] == [
        "http.response.start",
        "http.response.body",
    ]


@pytest.mark.parametrize(("path", "status"), [("/adapt/nothing", 404), ("/adapt/layout", 405), ("/adapts", 404)])
def test_what_fastapi_answers_below_our_routes_has_the_form(path: str, status: int) -> None:
    fields = json.loads(passed(path, status, JSON, b'{"detail": "No."}')[1]["body"])
    assert fields == {"object": "error", "message": "No.", "type": str(status), "param": None, "code": status}


def test_an_error_of_ours_passes_as_it_is() -> None:
    said = {"object": "error", "message": NAMED, "type": "invalid_request", "param": "rates", "code": "bad_rates"}
    body = json.dumps(said).encode()
    start, end = passed("/adapt/plan", 400, JSON, body[:5], body[5:])
    assert (start["headers"], end["body"]) == (JSON, body)


def test_what_is_no_json_passes() -> None:
    assert passed("/generate", 400, [(b"content-type", b"text/plain")], b"no")[1]["body"] == b"no"


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/generate", True),
        ("/v1/responses", True),
        ("/v1/messages", False),
        ("/api/chat", False),
        ("/adapt/plan", True),
    ],
)
def test_routes_with_a_form_of_their_own(path: str, ours: bool) -> None:
    assert has_form(path) is ours
