"""`/adapt/layout`: which layout serves, and the way to another one.

- `GET` gives it as the engines themselves say it.
- `POST {"layout": "tp2@0-1", "strategy": "auto"}` goes over to it and answers when that is done (200) or refused (409,
  with nothing changed). It stays until `POST {"layout": "auto"}` gives the decision back to the planner.
- `GET /adapt/plan?rates=TIER:RATE,...` (`?rates=RATE` without tiers) tells what the planner would do then; without
  rates, what it would do now, at what is asked for and with what runs.

All take stock's admin key (`--admin-api-key`, else `--api-key`); without a key, POST only from this machine.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs

import msgspec

from sglang_adapt.core.digits import number
from sglang_adapt.core.messages import LayoutAnswer
from sglang_adapt.front.errors import Refusal
from sglang_adapt.front.link import LinkClosedError, RouterLink
from sglang_adapt.policy.carry import Strategy
from sglang_adapt.upstream.front import ADMIN_BODY_BYTES

PATH = "/adapt/layout"
PLAN_PATH = "/adapt/plan"
MAX_RATE_RPS = 1e6
MAX_REASON = 200
"""Characters of why a layout is asked for."""
_HOW = (
    'send {"layout": "tp2@0-1", "strategy": "auto"}, or {"layout": "auto"} to let the planner decide; strategies are '
    + ", ".join(Strategy)
)
Answer = tuple[int, bytes]
Handler = Callable[[bytes, str | None], Awaitable[Answer]]
"""`handler(said, client)`: the request's body, of a GET its query string, and the client's address; gives HTTP
status and JSON body."""


class LayoutOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST.

    Attributes:
        layout: engines that cover every GPU once, e.g. `tp1@0,tp1@1`; `auto`: what the planner decides from now on.
        strategy: what becomes of requests of engines that leave (default: `auto`); with layout `auto`, which
            moves nothing by itself, no other.
        reason: for the log, which has a line for each switch.
    """

    layout: str
    strategy: Strategy | None = None
    reason: str = "asked for over HTTP"


class LayoutApi:
    """The handlers.

    Args:
        link: to the router.
        has_key: the server has an admin key or an API key, which stock checks.
        tiers: tells the names of the tiers now, none without tiers.
    """

    def __init__(self, link: RouterLink, has_key: bool, tiers: Callable[[], Iterable[str]] = lambda: ()) -> None:
        self._link = link
        self._has_key = has_key
        self._tiers = tiers

    @property
    def routes(self) -> dict[tuple[str, str], Handler]:
        """By method and path."""
        return {("GET", PATH): self.get, ("POST", PATH): self.post, ("GET", PLAN_PATH): self.plan}

    async def get(self, body: bytes, client: str | None) -> Answer:
        return await _answered(self._link.layout())

    async def post(self, body: bytes, client: str | None) -> Answer:
        if not self._has_key and not is_loopback(client):
            return refuse_stranger("the layout can be changed", client)
        if (large := refuse_large(body)) is not None:
            return large
        if not body.strip():
            return refuse(400, "bad_request", f"the body is empty; {_HOW}")
        try:
            order = msgspec.json.decode(body, type=LayoutOrder)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refuse(400, "bad_request", f"{_fault(body, error)}; {_HOW}")
        if len(order.reason) > MAX_REASON or not order.reason.isprintable():
            return refuse(
                400, "bad_request", f"reason: give one line of at most {MAX_REASON} characters; it goes to the log"
            )
        if order.layout == "auto" and order.strategy not in (None, Strategy.AUTO):
            return refuse(
                400,
                "bad_request",
                f"layout auto gives the decision back to the planner and moves nothing itself, so strategy "
                f"{order.strategy} would mean nothing; leave it out, or name a layout",
            )
        strategy = order.strategy or Strategy.AUTO
        return await _answered(self._link.switch(order.layout, strategy.value, order.reason))

    async def plan(self, query: bytes, client: str | None) -> Answer:
        rates = rates_of(query.decode("ascii", "replace"))
        if isinstance(rates, str):
            how = f"give rates as ?rates={self._example()}, or leave rates out: then it is what would be done now"
            return refuse(400, "bad_rates", f"{rates}; {how}", "rates")
        return await _answered(self._link.plan(rates))

    def _example(self) -> str:
        """Rates as they may be asked for here."""
        return ",".join(f"{tier}:{rate}" for tier, rate in zip(self._tiers(), (5, 20), strict=False)) or "20"


def _fault(body: bytes, error: Exception) -> str:
    """What is wrong with a body, in words; msgspec calls half of a surrogate pair truncated data."""
    try:
        text = body.decode()
    except UnicodeDecodeError as no_text:
        return f"the body is not UTF-8 (byte {no_text.start})"
    try:
        # Takes what msgspec does not.
        halves = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return f"the body is not JSON: {error}"
    if any("\ud800" <= character <= "\udfff" for character in halves):
        return "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return str(error)


def rates_of(query: str) -> dict[str, float] | str | None:
    """Requests/s by tier in a query string, the empty name for a bare number; or what is wrong with it; None if there
    are no rates in it."""
    given = parse_qs(query, keep_blank_values=True)
    unknown = sorted(set(given) - {"rates"})
    if unknown:
        return f"{_shown(unknown[0])} is not a parameter"
    if not given:
        return None
    rates: dict[str, float] = {}
    for part in ",".join(given["rates"]).split(","):
        tier, _, digits = part.strip().rpartition(":")
        try:
            rate = number(digits)
        except ValueError:
            return f"{_shown(part)} is not a rate"
        if not 0 <= rate <= MAX_RATE_RPS:
            return f"{_shown(part)} is not a rate from 0 to {MAX_RATE_RPS:g}"
        if tier in rates:
            return f"{_shown(part)} is given twice"
        rates[tier] = rate
    return rates


def _shown(text: str) -> str:
    """A client's text as it may stand in an answer."""
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def is_loopback(client: str | None) -> bool:
    """Is this the address of the machine itself? None, of a connection without one (a socket file), is."""
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    # A server on `::` sees IPv4 clients as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def _answered(asked: Awaitable[LayoutAnswer]) -> Answer:
    """What the router says, or why it says nothing."""
    try:
        answer = await asked
    except TimeoutError:
        return refuse(503, "no_router", "the router does not answer; the server is starting or broken")
    except LinkClosedError as error:
        return refuse(503, "draining", str(error))
    if answer.status != 200:
        return refuse(answer.status, answer.body["code"], answer.body["message"], answer.body.get("param"))
    return 200, json.dumps(answer.body).encode()


def refuse_large(body: bytes) -> Answer | None:
    """Of an order nobody needs more than a few lines."""
    if len(body) <= ADMIN_BODY_BYTES:
        return None
    return refuse(413, "too_large", f"the body has more than {ADMIN_BODY_BYTES} bytes; {_HOW}")


def refuse_stranger(what: str, client: str | None) -> Answer:
    """A server without keys is changed from its own machine only."""
    return refuse(
        403,
        "admin_only",
        f"{what} from this machine only, and {client} is another one; start the server with --admin-api-key to allow "
        "it to those who have the key",
    )


def refuse(status: int, code: str, message: str, param: str | None = None) -> Answer:
    """An error as the answer of a handler."""
    return status, Refusal(status, code, message, param).flat.body
