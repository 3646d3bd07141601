"""The gate: what tier a request is of, and whether it is served, before stock reads it.

The router decides (`router/admission.py`), because it knows the engines. So that refusing costs next to nothing when
much is refused, the gate remembers a refusal for some milliseconds and answers for the router meanwhile. If more come
in the second half of that time, it asks anew, and the refusal holds until the answer. When the time is over and it has
not asked, one request does, and what the same refusal would hold for waits for that answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from sglang_adapt.core.messages import AdmitAnswer, AdmitRequest
from sglang_adapt.core.slo import (
    BODY_FIELD,
    TIER_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    SloConfig,
    Terms,
    TermsError,
    request_terms,
)
from sglang_adapt.front.errors import Refusal
from sglang_adapt.front.link import LinkClosedError
from sglang_adapt.policy.tiers import TierSettings, target_faults, terms_fault

logger = logging.getLogger(__name__)

CLOSED_MS = 20.0
"""For so long a refusal holds for all requests of the same terms that are at least as long."""
ASK_AFTER_MS = 10.0
"""A refusal that is older and is told once more is asked for again, so that the next is there before it ends."""
_LOOK_MS = 100.0
"""For so long at most it holds on when it is asked for again; a router that is slower has much else to do."""
_MOST_CLOSED = 1024
_MOST_KNOWN = 1024
"""Ways to name a tier and targets whose terms are remembered; clients use few."""
_BYTES_PER_TOKEN = 4
"""Of English text, about; the router counts anew when the request is tokenized."""


class AsksRouter(Protocol):
    """The router, as far as the gate needs it."""

    async def admit(self, request: AdmitRequest) -> AdmitAnswer:
        """Its answer. Raises TimeoutError, LinkClosedError."""
        ...

    async def give_back(self, request_id: int) -> None:
        """A request that was admitted, or may have been, will not come."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is served.

    Attributes:
        request: as the router was asked.
    """

    request: AdmitRequest

    @property
    def terms(self) -> Terms:
        """What it asked for."""
        return self.request.terms


@dataclass(frozen=True, slots=True)
class _Closed:
    """A refusal that holds for requests of the same terms.

    Attributes:
        until_ms: when it ends.
        ask_ms: from when on it is asked for again.
        tokens: of the shortest prompt that it holds for.
        refusal: what they are told.
    """

    until_ms: float
    ask_ms: float
    tokens: int
    refusal: Refusal


class _Body(msgspec.Struct):
    """What the gate reads of a body: nothing that stock does not check later."""

    service_tier: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    sampling_params: Any = None


_BODY = msgspec.json.Decoder(_Body)


class Gate:
    """See the module.

    Args:
        settings: tiers, which there are, and speed.
        router: that decides.
        on_refused: told the terms of each request that is refused for want of room.
    """

    def __init__(
        self, settings: TierSettings, router: AsksRouter, on_refused: Callable[[Terms], None] = lambda terms: None
    ) -> None:
        if settings.config is None:
            raise ValueError("there are no tiers to admit by")
        self._settings = settings
        self.config: SloConfig = settings.config
        self._router = router
        self._on_refused = on_refused
        self._ids = itertools.count(1)
        self._closed: dict[Terms, _Closed] = {}
        self._asking: dict[Terms, asyncio.Future[None]] = {}
        self._looks: set[asyncio.Future[None]] = set()
        self._known: dict[tuple[str | None, ...], Terms] = {}

    def reload(self, config: SloConfig) -> None:
        """Other tiers from now on.

        Raises:
            ValueError: a target that can never be met; the old tiers stay.
        """
        faults = target_faults(self._settings, config)
        if faults:
            raise ValueError("; ".join(faults))
        self.config = config
        self._closed.clear()
        self._known.clear()

    async def enter(self, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Admitted | Refusal:
        """Decide about a request that has just arrived.

        Args:
            headers: of ASGI: lower-case names.
            body: JSON, as stock will read it; one that is none is stock's to refuse.
        """
        arrived_ms = time.monotonic() * 1000
        found = dict(reversed(list(headers)))
        fields = _fields(body)
        if isinstance(fields, Refusal):
            return fields
        terms = self._terms(fields.service_tier, found)
        if isinstance(terms, Refusal):
            return terms
        tokens = prompt_tokens(body)
        request = AdmitRequest(next(self._ids), terms, tokens, _most_output(fields), arrived_ms)
        while (closed := self._closed.get(terms)) is not None and tokens >= closed.tokens:
            if (now_ms := time.monotonic() * 1000) < closed.until_ms:
                return self._tell_again(closed, now_ms, request)
            asking = self._asking.get(terms)
            if asking is None:
                break
            # One of these terms has gone to ask whether it still holds.
            await asyncio.wait((asking,))
        if closed is None or terms in self._asking:
            return await self._ask(request)
        self._asking[terms] = asyncio.get_running_loop().create_future()
        try:
            return await self._ask(request)
        finally:
            self._asking.pop(terms).set_result(None)

    @property
    def refuses(self) -> bool:
        """Whether any refusal is remembered; if not, `refused_already` has nothing to say."""
        return bool(self._closed)

    def refused_already(self, found: Mapping[bytes, bytes], body: bytes | bytearray) -> Refusal | None:
        """What `enter` would say at once of a request that has just arrived, if that is a remembered refusal.

        It is told to `on_refused` as by `enter`. None: `enter` has to decide.

        Args:
            found: headers of ASGI, of each name the first.
            body: as for `enter`.
        """
        fields = _fields(body)
        if isinstance(fields, Refusal):
            return None
        terms = self._terms(fields.service_tier, found)
        if isinstance(terms, Refusal):
            return None
        closed, tokens = self._closed.get(terms), prompt_tokens(body)
        if closed is None or tokens < closed.tokens or (now_ms := time.monotonic() * 1000) >= closed.until_ms:
            return None
        if now_ms >= closed.ask_ms:
            return self._tell_again(
                closed, now_ms, AdmitRequest(next(self._ids), terms, tokens, _most_output(fields), now_ms)
            )
        self._on_refused(terms)
        return closed.refusal

    def _tell_again(self, closed: _Closed, now_ms: float, request: AdmitRequest) -> Refusal:
        """A refusal that holds; if it is old, the router is asked for the next one meanwhile."""
        terms = request.terms
        if now_ms >= closed.ask_ms and terms not in self._asking:
            self._asking[terms] = asyncio.get_running_loop().create_future()
            self._closed[terms] = replace(closed, until_ms=now_ms + _LOOK_MS)
            task = asyncio.ensure_future(self._look(request))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)
        self._on_refused(terms)
        return closed.refusal

    async def _look(self, request: AdmitRequest) -> None:
        """Ask as a request that was refused already would, to learn whether the next one will be."""
        try:
            if isinstance(await self._decided(request), Admitted):
                await self.left(request)
        finally:
            self._asking.pop(request.terms).set_result(None)

    def _terms(self, service_tier: object, found: Mapping[bytes, bytes]) -> Terms | Refusal:
        """What a request asks for; remembered, because most ask for the same."""
        named = (_text(found, TIER_HEADER), _text(found, TTFT_HEADER), _text(found, TPOT_HEADER))
        key = (service_tier, *named) if isinstance(service_tier, str) else (None, *named)
        if (service_tier is None or isinstance(service_tier, str)) and (known := self._known.get(key)) is not None:
            return known
        try:
            terms = request_terms(self.config, service_tier, *named)
        except TermsError as error:
            return Refusal(400, error.code, str(error), error.param)
        own = TTFT_HEADER.encode() in found or TPOT_HEADER.encode() in found
        if own and (fault := terms_fault(self._settings, terms)) is not None:
            return Refusal(400, "unmeetable_target", fault, TTFT_HEADER if "ttft" in fault else TPOT_HEADER)
        if service_tier is None or isinstance(service_tier, str):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = terms
        return terms

    async def _ask(self, request: AdmitRequest) -> Admitted | Refusal:
        decided = await self._decided(request)
        if isinstance(decided, Refusal) and decided.status == 429:
            self._on_refused(request.terms)
        return decided

    async def _decided(self, request: AdmitRequest) -> Admitted | Refusal:
        """What the router says; a refusal is remembered."""
        terms = request.terms
        try:
            answer = await self._router.admit(request)
        except TimeoutError:
            # Its answer may be on the way.
            await self.left(request)
            return Refusal(503, "no_engine", "the router does not answer; the server is starting or broken")
        except LinkClosedError as error:
            return Refusal(503, "draining", str(error))
        except asyncio.CancelledError:
            await self.left(request)
            raise
        closed = self._closed.get(terms)
        if answer.admitted:
            if closed is not None and request.tokens >= closed.tokens:
                del self._closed[terms]
            return Admitted(request)
        if answer.draining:
            return Refusal(503, "draining", answer.reason)
        refusal = Refusal(
            429,
            "tier_capacity_exhausted",
            f"tier {terms.tier}: {answer.reason}; try again in {answer.retry_after_s} s",
            BODY_FIELD,
            answer.retry_after_s,
        )
        if len(self._closed) >= _MOST_CLOSED:
            self._closed.clear()
        now, shortest = time.monotonic() * 1000, answer.holds_from or request.tokens
        if closed is not None and now < closed.ask_ms:
            # A shorter one has been refused meanwhile.
            shortest = min(shortest, closed.tokens)
        self._closed[terms] = _Closed(now + CLOSED_MS, now + ASK_AFTER_MS, shortest, refusal)
        return refusal

    async def left(self, request: AdmitRequest) -> None:
        """An admitted request has gone without being tokenized: stock refused it, or its client is gone."""
        await self._router.give_back(request.id)


def _fields(body: bytes | bytearray) -> _Body | Refusal:
    try:
        return _BODY.decode(body)
    except msgspec.DecodeError:
        return _Body()
    except RecursionError:
        # Its tier cannot be read, so it is not taken for one of the default tier.
        return Refusal(400, "bad_request", "the body is nested too deeply to be read; send a flatter one")


def prompt_tokens(body: bytes | bytearray) -> int:
    """About how many tokens a body's prompt has: commas of `input_ids`, a quarter of a text's bytes."""
    if b'"input_ids"' in body:
        return body.count(b",") + 1
    return math.ceil(len(body) / _BYTES_PER_TOKEN)


def _most_output(fields: _Body) -> int | None:
    sampling = fields.sampling_params
    inner = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    for value in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens, inner):
        if type(value) is int and 0 < value < 1 << 31:
            return value
    return None


def _text(headers: Mapping[bytes, bytes], name: str) -> str | None:
    value = headers.get(name.encode())
    return None if value is None else value.decode("latin-1")
