"""Our own messages between the front and the router. One struct a message, tagged, msgpack on the wire.

Stock messages keep stock's format and travel on stock's sockets; nothing is added to them.
"""

from __future__ import annotations

import msgspec


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine as the router sees it.

    Attributes:
        name: e.g. `tp2@0-1`.
        state: `starting`, `ready`, `dead` (being restarted) or `failed` (given up).
        active: part of the active layout.
        in_flight: accepted and unfinished requests on it.
        restarts: how often it was restarted since the start of the server.
        pids: process ids of its ranks.
    """

    name: str
    state: str
    active: bool
    in_flight: int
    restarts: int
    pids: list[int]


class RouterStatus(msgspec.Struct, frozen=True, tag=True):
    """Router to front: sent on every change of an engine's state and every second as a sign of life."""

    layout: str
    engines: list[EngineStatus]


class DrainRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: stop the engines and exit; the front sends it when its requests have ended."""

    timeout_s: float


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to router: send the status now."""


FrontToRouter = DrainRequest | StatusRequest
RouterToFront = RouterStatus

encode = msgspec.msgpack.Encoder().encode
decode_front_to_router = msgspec.msgpack.Decoder(FrontToRouter).decode
decode_router_to_front = msgspec.msgpack.Decoder(RouterToFront).decode
