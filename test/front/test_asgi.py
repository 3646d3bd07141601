"""Our ASGI layer around a stand-in for stock's app."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import Any

import httpx
import pytest

from sglang_adapt.core.messages import EngineStatus, RouterStatus
from sglang_adapt.front import asgi
from sglang_adapt.front.asgi import AdaptLayer
from sglang_adapt.upstream.front import KeysOfOurs


def status(*states: str) -> RouterStatus:
    engines = [EngineStatus(f"tp1@{i}", state, True, 0, 0, [i]) for i, state in enumerate(states)]
    return RouterStatus(layout="tp1@0,tp1@1", engines=engines)


class Link:
    """What the router says, as told by the test."""

    def __init__(self, status: RouterStatus | None) -> None:
        self.status = status

    async def ask(self) -> RouterStatus | None:
        return self.status

    def open(self) -> None:
        return None

    async def drain(self, timeout_s: float) -> None:
        return None

    async def no_more(self) -> None:
        return None

    def close(self) -> None:
        return None


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers 503 on /generate and 200 elsewhere, with the path as the body."""
    code = 503 if scope["path"] == "/generate" else 200
    await send({"type": "http.response.start", "status": code, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


class HangingRouter:
    """A router that never stops."""

    def is_alive(self) -> bool:
        return True


def ask(said: RouterStatus | None, method: str, path: str) -> httpx.Response:
    layer = AdaptLayer(app, Link(said), 1.0, lambda: None, lambda: None)  # type: ignore[arg-type, return-value]

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(layer), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "code", "word"),
    [
        (status("ready", "ready"), 200, "ok"),
        (status("ready", "dead"), 200, "degraded"),
        (status("dead", "starting"), 503, "no_engine"),
        (None, 503, "no_engine"),
    ],
)
def test_health(said: RouterStatus | None, code: int, word: str) -> None:
    answer = ask(said, "GET", "/health")
    assert (answer.status_code, answer.json()["status"]) == (code, word)
    assert ask(said, "GET", "/ready").status_code == code


def test_work_is_refused_without_an_engine_in_the_shape_of_its_route() -> None:
    openai = ask(status("dead", "dead"), "POST", "/v1/chat/completions")
    assert openai.status_code == 503
    assert openai.json()["error"]["code"] == "no_engine"
    native = ask(status("dead", "dead"), "POST", "/generate")
    assert native.json()["code"] == "no_engine"
    assert openai.headers["retry-after"] == native.headers["retry-after"] == "1"


def test_a_client_is_not_told_to_wait_for_engines_that_were_given_up() -> None:
    assert "try again shortly" in ask(status("failed", "dead"), "POST", "/generate").text
    given_up = ask(status("failed", "failed"), "POST", "/generate")
    assert given_up.status_code == 503
    assert "given up all engines of layout tp1@0,tp1@1" in given_up.text


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/model_info"), ("POST", "/flush_cache")])
def test_what_is_not_work_passes(method: str, path: str) -> None:
    answer = ask(status("dead", "dead"), method, path)
    assert (answer.status_code, answer.text) == (200, path)


def test_stocks_own_503_gets_retry_after() -> None:
    answer = ask(status("ready"), "POST", "/generate")
    assert (answer.status_code, answer.text) == (503, "/generate")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/adapt", "/adapt/", "/health", "/ready", "/adapt/engines"])
def test_what_is_only_told_takes_no_other_method(path: str) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = ask(status("ready"), method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        assert answer.json() == {
            "object": "error",
            "message": "Method Not Allowed",
            "type": "405",
            "param": None,
            "code": 405,
        }
    assert ask(status("ready"), "HEAD", path).status_code == 200


def test_engines_route() -> None:
    body = ask(status("ready", "dead"), "GET", "/adapt/engines").json()
    assert [(engine["name"], engine["state"]) for engine in body["engines"]] == [("tp1@0", "ready"), ("tp1@1", "dead")]
    assert [engine["last_death"] for engine in body["engines"]] == [None, None]


def test_a_router_that_hangs_does_not_keep_the_server_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "STOP_GRACE_S", 0.2)
    stopped: list[int] = []
    layer = AdaptLayer(app, Link(status("ready")), 0.1, HangingRouter, lambda: None)  # type: ignore[arg-type]

    async def run() -> float:
        monkeypatch.setattr(signal, "getsignal", lambda sig: lambda number, frame: stopped.append(number))
        layer._take_signals()
        started = time.monotonic()
        layer._start_drain()
        assert layer._draining is not None
        await asyncio.wait_for(layer._draining, 5)
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.3
    assert stopped == [signal.SIGTERM]


def test_the_page_is_for_everyone_and_asks_nobody_else() -> None:
    answer = ask(None, "GET", "/adapt")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    # Nothing is fetched but what the script asks this server for.
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import""", answer.text)
    assert set(re.findall(r'fetch\("([^"]*)"', answer.text)) == {"/adapt/events", "/adapt/layout"}
    assert ask(None, "HEAD", "/adapt/").content == b""


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/adapt", True),
        ("HEAD", "/adapt/", True),
        ("POST", "/adapt", False),
        ("GET", "/adapt/events", False),
        ("GET", "/ready", True),
        ("GET", "/adapt/engines", False),
    ],
)
def test_only_the_page_itself_and_ready_are_without_key(method: str, path: str, allowed: bool) -> None:
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    decision = KeysOfOurs.hook(
        decide_request_auth,
        method=method,
        path=path,
        authorization_header=None,
        api_key="k",
        admin_api_key=None,
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    assert decision.allowed is allowed


def test_the_end_of_the_http_server_is_told_before_stock_waits_for_the_warm_up() -> None:
    told: list[str] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        told.append((await receive())["type"])

    async def says() -> dict[str, str]:
        return {"type": "lifespan.shutdown"}

    layer = AdaptLayer(
        waits,
        Link(None),  # type: ignore[arg-type]
        1.0,
        lambda: None,  # type: ignore[arg-type, return-value]
        lambda: None,
        stopped=lambda: told.append("stopped"),
    )
    asyncio.run(layer({"type": "lifespan"}, says, None))  # type: ignore[arg-type]
    assert told == ["stopped", "lifespan.shutdown"]


@pytest.mark.parametrize(("given", "allowed"), [("Bearer k", True), ("Bearer \xff", False), ("Bearer ｋ", False)])
def test_a_key_of_other_letters_is_a_wrong_one(given: str, allowed: bool) -> None:
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    decision = KeysOfOurs.hook(
        decide_request_auth,
        method="GET",
        path="/adapt/layout",
        authorization_header=given,
        api_key="k",
        admin_api_key=None,
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    assert decision.allowed is allowed
