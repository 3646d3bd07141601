"""Routes of ours on stock's app: methods, bodies, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from sglang_adapt.upstream.front import ADMIN_BODY_BYTES, _add_admin_route, _add_event_route


def ask(method: str, path: str, **more: Any) -> tuple[httpx.Response, list[bytes]]:
    said: list[bytes] = []

    async def handler(body: bytes, client: str | None) -> tuple[int, bytes]:
        said.append(body)
        return 200, b"{}"

    async def events() -> AsyncIterator[bytes]:
        said.append(b"looked")
        yield b"data: 1\n\n"

    async def run() -> httpx.Response:
        app = Starlette()
        _add_admin_route(app, "/layout", {"GET": handler, "POST": handler})
        _add_event_route(app, "/events", events)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **more)

    return asyncio.run(run()), said


def test_each_method_of_a_route_is_told() -> None:
    answer, said = ask("PUT", "/layout")
    assert (answer.status_code, said) == (405, [])
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize(("method", "got"), [("GET", b"a=1"), ("HEAD", b"a=1"), ("POST", b"body")])
def test_a_handler_gets_what_its_method_says(method: str, got: bytes) -> None:
    more = {"content": b"body"} if method == "POST" else {}
    answer, said = ask(method, "/layout?a=1", **more)
    assert (answer.status_code, said) == (200, [got])


def test_of_a_huge_body_no_more_is_read_than_shows_it() -> None:
    _, said = ask("POST", "/layout", content=b"x" * (4 * ADMIN_BODY_BYTES))
    assert [len(body) for body in said] == [ADMIN_BODY_BYTES + 1]


def test_a_stream_is_not_begun_for_its_headers() -> None:
    answer, said = ask("HEAD", "/events")
    assert (answer.status_code, answer.headers["content-type"], said) == (200, "text/event-stream; charset=utf-8", [])
    assert ask("GET", "/events")[1] == [b"looked"]
