"""Tiers at the door: what is read of a request, who is refused and how, and that a ticket reaches the router."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest, EngineStatus, RequestReport, RouterStatus
from sglang_adapt.core.profile import DecodePoint, PrefillPoint, Profile, ProfileKey, TpProfile
from sglang_adapt.core.slo import SloConfig, Terms, Tier
from sglang_adapt.front.accounting import Accounting
from sglang_adapt.front.asgi import AdaptLayer
from sglang_adapt.front.gate import CLOSED_MS, Admitted, Gate, prompt_tokens
from sglang_adapt.front.refusal_log import RefusalLog, keep_out_of_access_log, refusing
from sglang_adapt.front.slo_api import PATH, SloApi
from sglang_adapt.policy.tiers import TierSettings
from sglang_adapt.upstream import tickets, wire

CONFIG = SloConfig((Tier("strict", 300.0, 10.0), Tier("loose", 900.0, 50.0)), "loose")
KEY = ProfileKey("m", "float32", "g", "0.5.17", "2.11.0", "torch_native")
PROFILE = Profile(KEY, (TpProfile(1, (PrefillPoint(1, 0, 20.0),), (DecodePoint(1, 1, 5.0),)),))


def tier_settings(config: SloConfig | None = CONFIG, source: str | None = "test") -> TierSettings:
    return TierSettings(config, source, KEY, (1,), 1, PROFILE, ())


class Router:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, *refusals: tuple[int, str]) -> None:
        self.asked: list[AdmitRequest] = []
        self.refusals = list(refusals)
        self.told: list[SloConfig] = []
        self.returned: list[int] = []

    async def admit(self, request: AdmitRequest) -> AdmitAnswer:
        self.asked.append(request)
        if self.refusals:
            return AdmitAnswer(request.id, False, *self.refusals.pop(0))
        return AdmitAnswer(request.id, True)

    async def give_back(self, request_id: int) -> None:
        self.returned.append(request_id)

    async def tell(self, config: SloConfig) -> None:
        self.told.append(config)


def enter(gate: Gate, body: bytes = b"{}", **headers: str) -> Any:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return asyncio.run(gate.enter(raw, body))


def test_terms_size_and_length_of_a_request_are_read() -> None:
    router = Router()
    gate = Gate(tier_settings(), router)
    admitted = enter(gate, b'{"service_tier": "strict", "prompt": "%s", "max_tokens": 7}' % (b"x" * 4000))
    assert admitted == Admitted(router.asked[0]) and admitted.terms == Terms("strict", 300.0, 10.0)
    asked = router.asked[0]
    assert (asked.terms.tier, asked.output) == ("strict", 7)
    assert 1000 <= asked.tokens <= 1020
    enter(gate, b'{"input_ids": [1,2,3], "sampling_params": {"max_new_tokens": 9}}', x_adapt_tier="strict")
    assert router.asked[1].output == 9 and router.asked[1].terms.tier == "strict"


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b"\xff", b'{"max_tokens": "a", "sampling_params": 3}'])
def test_what_stock_will_refuse_is_left_to_stock(body: bytes) -> None:
    assert isinstance(enter(Gate(tier_settings(), Router()), body), Admitted)


@pytest.mark.parametrize("field", [b"service_tier", b"x"])
def test_a_body_that_is_nested_too_deeply_is_refused(field: bytes) -> None:
    router = Router()
    refusal = enter(Gate(tier_settings(), router), b'{"%s":' % field + b"[" * 200_000)
    assert (refusal.status, refusal.code) == (400, "bad_request")
    assert "nested too deeply" in refusal.message
    assert router.asked == []


def test_size_of_prompts() -> None:
    assert prompt_tokens(b'{"input_ids": [1, 2, 3]}') == 3
    assert prompt_tokens(b"x" * 401) == 101


@pytest.mark.parametrize(
    ("headers", "code", "param"),
    [
        ({"x_adapt_tier": "gold"}, "unknown_tier", "x-adapt-tier"),
        ({"x_slo_ttft_ms": "-5"}, "bad_target", "x-slo-ttft-ms"),
        ({"x_slo_tpot_ms": "soon"}, "bad_target", "x-slo-tpot-ms"),
        ({"x_slo_ttft_ms": "19"}, "unmeetable_target", "x-slo-ttft-ms"),
        ({"x_slo_tpot_ms": "4.9"}, "unmeetable_target", "x-slo-tpot-ms"),
    ],
)
def test_bad_terms_are_told_before_the_router_is_asked(headers: dict[str, str], code: str, param: str) -> None:
    router = Router()
    refusal = enter(Gate(tier_settings(), router), **headers)
    assert (refusal.status, refusal.code, refusal.param) == (400, code, param)
    assert router.asked == []


def test_a_refusal_holds_for_a_moment_for_the_same_terms_and_not_for_others() -> None:
    router, refused = Router((7, "full")), []
    gate = Gate(tier_settings(), router, refused.append)

    asked = ((b"strict", 400), (b"strict", 400), (b"strict", 40), (b"loose", 400))

    async def run() -> list[Any]:
        async def ask(tier: bytes, size: int) -> Any:
            return await gate.enter([(b"x-adapt-tier", tier)], b" " * size)

        return [await ask(tier, size) for tier, size in asked]

    first, second, smaller, other = asyncio.run(run())
    assert (first.status, first.code, first.retry_after_s) == (429, "tier_capacity_exhausted", 7)
    assert "tier strict: full; try again in 7 s" in first.message
    assert second is first
    assert isinstance(smaller, Admitted) and isinstance(other, Admitted)
    assert len(router.asked) == 3
    assert [terms.tier for terms in refused] == ["strict", "strict"]


def test_when_a_refusal_has_run_out_one_asks_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that would be refused with it; a shorter one, and one of other terms, ask for themselves."""

    class Slow(Router):
        async def admit(self, request: AdmitRequest) -> AdmitAnswer:
            if self.asked:
                await answer.wait()
            return await super().admit(request)

    now = 100.0
    monkeypatch.setattr("sglang_adapt.front.gate.time.monotonic", lambda: now)
    router = Slow((1, "first"), (2, "second"))
    gate, answer = Gate(tier_settings(), router), asyncio.Event()

    async def ask(tier: bytes, size: int) -> Any:
        return await gate.enter([(b"x-adapt-tier", tier)], b" " * size)

    async def run() -> list[Any]:
        nonlocal now
        assert (await ask(b"strict", 400)).retry_after_s == 1
        now += CLOSED_MS / 1000
        tasks = [asyncio.create_task(ask(b"strict", 400)) for _ in range(50)]
        await asyncio.sleep(0)
        answer.set()
        return await asyncio.gather(*tasks, ask(b"strict", 40), ask(b"loose", 400))

    *same, shorter, other = asyncio.run(run())
    assert [refusal.retry_after_s for refusal in same] == [2] * 50
    assert isinstance(shorter, Admitted) and isinstance(other, Admitted)
    assert len(router.asked) == 4


def test_when_there_is_room_again_those_that_waited_ask_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("sglang_adapt.front.gate.time.monotonic", lambda: now)
    router = Router((1, "full"))
    gate = Gate(tier_settings(), router)

    async def run() -> list[Any]:
        nonlocal now
        await gate.enter([], b" " * 400)
        now += CLOSED_MS / 1000
        return await asyncio.gather(*(gate.enter([], b" " * 400) for _ in range(5)))

    assert all(isinstance(one, Admitted) for one in asyncio.run(run()))
    assert len(router.asked) == 6


def test_terms_are_those_of_the_tiers_now() -> None:
    router = Router()
    gate = Gate(tier_settings(), router)
    enter(gate, x_adapt_tier="strict")
    enter(gate, x_adapt_tier="strict", x_slo_ttft_ms="200")
    gate.reload(SloConfig((Tier("strict", 400.0, 10.0),), "strict"))
    enter(gate, x_adapt_tier="strict")
    enter(gate, b'{"service_tier": "strict"}')
    assert [request.terms.ttft_ms for request in router.asked] == [300.0, 200.0, 400.0, 400.0]
    assert enter(gate, b'{"service_tier": ["strict"]}').code == "unknown_tier"


def test_a_refused_request_has_no_line_in_the_access_log_and_others_have(caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")

    async def run() -> None:
        async def one(refuse: bool, line: str) -> None:
            if refuse:
                refusing()
            await asyncio.sleep(0)
            access.info(line)

        await asyncio.gather(one(True, "refused"), one(False, "served"))

    with caplog.at_level(logging.INFO, "uvicorn.access"):
        keep_out_of_access_log()
        try:
            asyncio.run(run())
        finally:
            del access.isEnabledFor
    assert caplog.messages == ["served"]


def test_refusals_are_told_together(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_adapt.front.refusal_log.INTERVAL_S", 0.01)

    async def run() -> None:
        log = RefusalLog()
        for tier in ("strict", "loose", "strict"):
            log.refused(tier)
        while not caplog.messages:
            await asyncio.sleep(0.001)

    with caplog.at_level(logging.INFO, "sglang_adapt.front.refusal_log"):
        asyncio.run(asyncio.wait_for(run(), 10))
    assert [message.partition(": ")[2] for message in caplog.messages] == ["1 of tier loose, 2 of tier strict"]


def test_the_http_server_reads_requests_with_httptools() -> None:
    """Without it uvicorn takes h11 without a word, which is half as fast."""
    assert AutoHTTPProtocol is HttpToolsProtocol


class Link:
    """One engine is up."""

    status = RouterStatus("tp1@0", [EngineStatus("tp1@0", "ready", True, 0, 0, [1])])


def served(gate: Gate, path: str, **headers: str) -> tuple[httpx.Response, list[Any]]:
    """An answer of the layer around an app that reads the body and sends a request to the engines as stock does."""
    sent: list[Any] = []

    class Manager:
        class send_to_scheduler:
            send = staticmethod(sent.append)

    class Request:
        rid = "r1"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append((await receive())["body"])

        async def task() -> None:
            tickets.TicketBeforeRequest.hook(Manager, Request)
            tickets.TicketsBeforeBatch.hook(Manager, [Request])

        await asyncio.create_task(task())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    layer = AdaptLayer(app, Link(), 1.0, lambda: None, lambda: None, gate)  # type: ignore[arg-type, return-value]

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(layer), base_url="http://test") as client:
            return await client.post(path, content=b'{"a": 1}', headers=headers)

    return asyncio.run(run()), sent


def test_a_ticket_goes_before_the_request_and_the_tier_comes_back() -> None:
    router = Router()
    answer, sent = served(Gate(tier_settings(), router), "/generate", **{"x-adapt-tier": "strict"})
    assert (answer.status_code, answer.text, answer.headers["x-adapt-tier"]) == (200, "done", "strict")
    assert sent[0] == b'{"a": 1}'
    assert [wire.ticket_of(data) for data in sent[1:]] == [("r1", router.asked[0]), ("r1", router.asked[0])]
    assert router.returned == []
    assert wire.peek_tag(sent[1]) == wire.TICKET


def through(gate: Gate, app: Any, path: str, receive: Any) -> list[dict[str, Any]]:
    """What an app behind the layer sends for one request."""
    sent: list[dict[str, Any]] = []
    layer = AdaptLayer(app, Link(), 1.0, lambda: None, lambda: None, gate)  # type: ignore[arg-type, return-value]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"x-adapt-tier", b"strict")]}
    asyncio.run(layer(scope, receive, send))
    return sent


async def whole_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"{}"}


def test_a_place_is_given_back_if_nothing_was_tokenized() -> None:
    """Stock has refused the request, or its client has gone."""
    router = Router()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise OSError("the client has gone")

    with pytest.raises(OSError, match="gone"):
        through(Gate(tier_settings(), router), app, "/generate", whole_body)
    assert router.returned == [router.asked[0].id]


def test_a_client_that_goes_while_the_router_is_asked_gives_its_place_back() -> None:
    class Slow(Router):
        async def admit(self, request: AdmitRequest) -> AdmitAnswer:
            self.asked.append(request)
            started.set()
            return await asyncio.Future()

    router = Slow()

    async def run() -> None:
        nonlocal started
        started = asyncio.Event()
        task = asyncio.create_task(Gate(tier_settings(), router).enter([], b"{}"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    started: asyncio.Event
    asyncio.run(run())
    assert router.returned == [router.asked[0].id]


def test_a_client_that_goes_before_its_body_has_come_is_not_asked_for() -> None:
    router = Router()
    parts = iter(({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}))

    async def receive() -> dict[str, Any]:
        return next(parts)

    assert through(Gate(tier_settings(), router), None, "/generate", receive) == []
    assert router.asked == []


def test_a_router_that_drains_meanwhile_is_a_503() -> None:
    class Draining(Router):
        async def admit(self, request: AdmitRequest) -> AdmitAnswer:
            return AdmitAnswer(request.id, False, reason="the server is shutting down", draining=True)

    refusal = enter(Gate(tier_settings(), Draining()))
    assert (refusal.status, refusal.code) == (503, "draining")


@pytest.mark.parametrize(
    ("path", "kind", "bodies", "wanted"),
    [
        ("/v1/chat/completions", b"application/json", [b'{"id":1}'], [b'{"service_tier":"strict","id":1}']),
        ("/v1/completions", b"application/json", [b'{"id":1}'], [b'{"id":1}']),
        (
            "/v1/chat/completions",
            b"text/event-stream; charset=utf-8",
            [b'data: {"id":1}\n\ndata: {"id":2}\n\n', b"data: [DONE]\n\n"],
            [
                b'data: {"service_tier":"strict","id":1}\n\ndata: {"service_tier":"strict","id":2}\n\n',
                b"data: [DONE]\n\n",
            ],
        ),
    ],
)
def test_the_tier_is_in_the_body_where_the_api_has_it(
    path: str, kind: bytes, bodies: list[bytes], wanted: list[bytes]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind)]
        if kind == b"application/json":
            headers.append((b"content-length", str(len(bodies[0])).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": body is not bodies[-1]})

    start, *rest = through(Gate(tier_settings(), Router()), app, path, whole_body)
    assert [message["body"] for message in rest] == wanted
    lengths = [int(value) for name, value in start["headers"] if name == b"content-length"]
    assert lengths in ([], [len(wanted[0])])


def test_work_without_tokens_has_no_ticket() -> None:
    router = Router()
    answer, sent = served(Gate(tier_settings(), router), "/v1/embeddings")
    assert answer.status_code == 200 and "x-adapt-tier" not in answer.headers
    assert sent == [b'{"a": 1}'] and router.asked == []


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_refusal_has_the_shape_of_its_route(path: str) -> None:
    answer, sent = served(Gate(tier_settings(), Router((3, "full"))), path)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    error = answer.json() if path == "/generate" else answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "tier_capacity_exhausted",
        "rate_limit_exceeded",
        "service_tier",
    )
    assert sent == []


def test_tiers_are_read_again_whole_or_not_at_all(tmp_path) -> None:
    file, router = tmp_path / "tiers.yaml", Router()
    settings = tier_settings(source=str(file))
    gate = Gate(settings, router)
    api = SloApi(settings, gate, router.tell, has_key=False)
    post = api.routes["POST", PATH]

    def reload(text: str) -> tuple[int, dict[str, Any]]:
        file.write_text(text)
        status, body = asyncio.run(post(b"", "127.0.0.1"))
        return status, json.loads(body)

    status, body = reload("default: a\ntiers:\n- {name: a, ttft_ms: 1, tpot_ms: x}")
    assert (status, body["code"]) == (400, "bad_slo_config") and "line 3, tiers[0].tpot_ms" in body["message"]
    status, body = reload("default: a\ntiers:\n- {name: a, ttft_ms: 100, tpot_ms: 4}")
    assert status == 400 and "tier a: tpot_ms 4 cannot be met by any engine here" in body["message"]
    assert gate.config is CONFIG and router.told == []
    status, body = reload("default: a\ntiers:\n- {name: a, ttft_ms: 100, tpot_ms: 40}")
    assert (status, body["config"]["default"]) == (200, "a")
    assert [tier.name for tier in gate.config.tiers] == ["a"] and router.told == [gate.config]


def test_who_may_read_tiers_again() -> None:
    api = SloApi(tier_settings(), Gate(tier_settings(), Router()), Router().tell, has_key=False)
    assert asyncio.run(api.post(b"", "10.0.0.7"))[0] == 403
    without = SloApi(tier_settings(None, None), None, Router().tell, has_key=False)
    assert asyncio.run(without.post(b"", None))[0] == 409
    said = json.loads(asyncio.run(without.get(b"", "10.0.0.7"))[1])
    assert said["config"] is None and said["profile_key"]["gpu"] == "g"


def report(ttft_ms: float | None, tpot_ms: float | None, ended: str = "finished") -> RequestReport:
    terms = Terms("strict", 300.0, 10.0)
    return RequestReport("r", terms, "feasible", ended, "tp1@0", 0.0, 1.0, ttft_ms, tpot_ms, 200.0, 8.0, 5, 9)


def test_a_line_for_each_request() -> None:
    log = io.StringIO()
    accounting = Accounting(log, with_metrics=False)
    accounting.ended(report(250.0, 12.0))
    accounting.refused(Terms("strict", 300.0, 10.0))
    first, second = map(json.loads, log.getvalue().splitlines())
    assert (first["tier"], first["met_ttft"], first["met_tpot"]) == ("strict", True, False)
    assert (first["forecast_ttft_ms"], first["ttft_ms"]) == (200.0, 250.0)
    assert (second["outcome"], second["tier"]) == ("refused", "strict")


@pytest.mark.parametrize(
    ("ended", "met"),
    [
        (report(300.0, 10.0), (True, True)),
        (report(300.1, 10.0), (False, True)),
        (report(1.0, None), (True, True)),
        (report(None, None), (False, True)),
        (report(1.0, 1.0, "stopped"), (False, False)),
    ],
)
def test_met(ended: RequestReport, met: tuple[bool, bool]) -> None:
    assert ended.met == met
