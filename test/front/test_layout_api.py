"""Who may change the layout over HTTP, and what is answered to what cannot be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_adapt.core.messages import LayoutAnswer
from sglang_adapt.front.layout_api import PATH, PLAN_PATH, LayoutApi, rates_of
from sglang_adapt.front.link import LinkClosedError
from sglang_adapt.upstream.front import ADMIN_BODY_BYTES

ORDER = b'{"layout": "tp2@0-1", "strategy": "migrate"}'


class Link:
    """The router: what it was asked, and what it answers."""

    def __init__(self, answer: LayoutAnswer | None, closed: bool = False) -> None:
        self.closed = closed
        self.asked: list[tuple[str, str, str]] = []
        self._answer = answer

    async def layout(self) -> LayoutAnswer:
        if self.closed:
            raise LinkClosedError("the server is shutting down")
        if self._answer is None:
            raise TimeoutError
        return self._answer

    async def plan(self, rates: dict[str, float] | None) -> LayoutAnswer:
        self.rates = rates
        return await self.layout()

    async def switch(self, layout: str, strategy: str, reason: str) -> LayoutAnswer:
        self.asked.append((layout, strategy, reason))
        return await self.layout()


DONE = LayoutAnswer(1, 200, {"active": "tp2@0-1"})


def post(
    body: bytes, client: str | None, has_key: bool = False, said: LayoutAnswer | None = DONE
) -> tuple[int, Any, Link]:
    link = Link(said)
    handler = LayoutApi(link, has_key).routes["POST", PATH]  # type: ignore[arg-type]
    status, answer = asyncio.run(handler(body, client))
    return status, json.loads(answer), link


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", None])
def test_this_machine_may_without_a_key(client: str | None) -> None:
    status, answer, link = post(ORDER, client)
    assert (status, answer) == (200, {"active": "tp2@0-1"})
    assert link.asked == [("tp2@0-1", "migrate", "asked for over HTTP")]


@pytest.mark.parametrize("client", ["10.0.0.7", "192.168.1.2", "2001:db8::1", "::ffff:10.0.0.7", "a-name"])
def test_another_machine_needs_a_key(client: str) -> None:
    status, answer, link = post(ORDER, client)
    assert (status, answer["code"]) == (403, "admin_only")
    assert f"{client} is another one; start the server with --admin-api-key" in answer["message"]
    assert link.asked == []
    # With a key stock has checked it before.
    assert post(ORDER, client, has_key=True)[0] == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"[" * 60_000, "the body is not JSON"),
        (b"tp2@0-1", "the body is not JSON: JSON is malformed"),
        (b'{"layout": "tp2@0-1"', "the body is not JSON"),
        (b'{"layout": "\\ud800"}', "half of a surrogate pair"),
        (b'{"layout": "tp2@0-1", "\\udc00": 1}', "half of a surrogate pair"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `layout`"),
        (b'{"layout": 2}', "Expected `str`"),
        (b'{"layout": "tp2@0-1", "strategy": "teleport"}', "Invalid enum value 'teleport'"),
        (b'{"layout": "tp2@0-1", "when": 3}', "unknown field `when`"),
        (b'{"layout": "\xff"}', "the body is not UTF-8 (byte 12)"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(body: bytes, reason: str) -> None:
    status, answer, link = post(body, "127.0.0.1")
    assert (status, answer["code"]) == (400, "bad_request")
    assert reason in answer["message"]
    assert "strategies are auto, migrate, keep, drain, recompute" in answer["message"]
    assert link.asked == []


def test_a_huge_body_is_refused() -> None:
    status, answer, link = post(b" " * ADMIN_BODY_BYTES + b"x", None)
    assert (status, answer["code"], link.asked) == (413, "too_large", [])


@pytest.mark.parametrize("reason", ["two\nlines", "x" * 201, "\u2028"])
def test_a_reason_is_a_line_of_the_log(reason: str) -> None:
    status, answer, link = post(json.dumps({"layout": "tp2@0-1", "reason": reason}).encode(), None)
    assert (status, link.asked) == (400, [])
    assert "reason: give one line of at most 200 characters" in answer["message"]


def test_the_planner_takes_no_strategy() -> None:
    status, answer, link = post(b'{"layout": "auto", "strategy": "keep"}', None)
    assert (status, link.asked) == (400, [])
    assert "strategy keep would mean nothing; leave it out" in answer["message"]
    for body in (b'{"layout": "auto"}', b'{"layout": "auto", "strategy": "auto"}'):
        assert post(body, None)[2].asked == [("auto", "auto", "asked for over HTTP")]


@pytest.mark.parametrize("status", [400, 409, 500, 503])
def test_what_the_router_refuses_is_passed_on(status: int) -> None:
    got, answer, _ = post(ORDER, None, said=LayoutAnswer(1, status, {"code": "why", "message": "because"}))
    assert (got, answer["code"], answer["message"]) == (status, "why", "because")


def test_get_is_for_everyone_and_says_when_there_is_no_router() -> None:
    for said, status in ((DONE, 200), (None, 503)):
        handler = LayoutApi(Link(said), has_key=False).routes["GET", PATH]  # type: ignore[arg-type]
        got, answer = asyncio.run(handler(b"", "10.0.0.7"))
        assert got == status
    assert json.loads(answer)["code"] == "no_router"


@pytest.mark.parametrize(
    ("query", "rates"),
    [
        ("", None),
        ("rates=20", {"": 20.0}),
        ("rates=strict:5,loose:0.5", {"strict": 5.0, "loose": 0.5}),
        ("rates=strict%3A5%2C%20loose:1e2", {"strict": 5.0, "loose": 100.0}),
        ("rates=strict:5&rates=loose:1", {"strict": 5.0, "loose": 1.0}),
    ],
)
def test_rates(query: str, rates: dict[str, float] | None) -> None:
    assert rates_of(query) == rates


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rates=", "'' is not a rate"),
        ("rates=many", "'many' is not a rate"),
        ("rates=strict:", "'strict:' is not a rate"),
        ("rates=1_0", "'1_0' is not a rate"),
        ("rates=%EF%BC%91", "'１' is not a rate"),
        ("rates=strict:-1", "is not a rate from 0"),
        ("rates=strict:nan", "is not a rate from 0"),
        ("rates=strict:inf", "is not a rate from 0"),
        ("rates=a:1,a:2", "'a:2' is given twice"),
        ("rates=1&when=now", "'when' is not a parameter"),
        ("rates=" + "a" * 500, f"'{'a' * 60}...' is not a rate"),
    ],
)
def test_rates_that_are_none(query: str, fault: str) -> None:
    found = rates_of(query)
    assert isinstance(found, str) and fault in found


def test_a_plan_is_asked_for_by_rates() -> None:
    link = Link(DONE)
    handler = LayoutApi(link, has_key=False).routes["GET", PLAN_PATH]  # type: ignore[arg-type]
    status, answer = asyncio.run(handler(b"rates=strict:5", "10.0.0.7"))
    assert (status, json.loads(answer), link.rates) == (200, DONE.body, {"strict": 5.0})
    assert asyncio.run(handler(b"", "10.0.0.7"))[0] == 200
    assert link.rates is None
    for query in (b"rates=x", b"rates=", b"when=now"):
        status, answer = asyncio.run(handler(query, "10.0.0.7"))
        said = json.loads(answer)
        assert (status, said["code"], said["param"]) == (400, "bad_rates", "rates")


@pytest.mark.parametrize(("tiers", "example"), [((), "20"), (("strict",), "strict:5"), (("a", "b", "c"), "a:5,b:20")])
def test_rates_that_are_none_are_answered_with_some_of_this_server(tiers: tuple[str, ...], example: str) -> None:
    handler = LayoutApi(Link(DONE), False, lambda: tiers).routes["GET", PLAN_PATH]  # type: ignore[arg-type]
    message = json.loads(asyncio.run(handler(b"rates=strict:", None))[1])["message"]
    assert f"give rates as ?rates={example}, or leave" in message
    assert not isinstance(rates_of(f"rates={example}"), str)


@pytest.mark.parametrize(
    ("method", "path", "said"), [("GET", PATH, b""), ("POST", PATH, ORDER), ("GET", PLAN_PATH, b"rates=1")]
)
def test_who_asks_a_server_that_stops_is_told_so(method: str, path: str, said: bytes) -> None:
    handler = LayoutApi(Link(DONE, closed=True), has_key=False).routes[method, path]  # type: ignore[arg-type]
    status, answer = asyncio.run(handler(said, None))
    assert (status, json.loads(answer)["code"]) == (503, "draining")
