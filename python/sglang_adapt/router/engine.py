"""The router's view of one engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class EngineState(StrEnum):
    STARTING = "starting"
    """Its ranks are loading, or it is running its warm-up request."""
    READY = "ready"
    """It has answered its warm-up request."""
    DEAD = "dead"
    """A rank ended; the engine is about to be started again."""
    FAILED = "failed"
    """It died too often and is not started again."""
    STOPPED = "stopped"
    """It was told to shut down."""


@dataclass(eq=False)
class Engine:
    """One engine and what is unfinished on it.

    Attributes:
        name: e.g. `tp2@0-1`.
        send: puts one stock message on the engine's input; raises zmq.Again when nobody is connected.
        last_death: why it was lost the last time; None if it never was.
        in_flight: request id to prompt tokens, for every request accepted and not ended.
        unread: of these the ones that have given no token yet, likewise.
        blocks: (leased, free) KV blocks on each of its GPUs; None without a shared pool.
    """

    name: str
    send: Callable[[bytes], None]
    state: EngineState = EngineState.STARTING
    restarts: int = 0
    pids: list[int] = field(default_factory=list)
    last_death: str | None = None
    in_flight: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    blocks: tuple[int, int] | None = None
