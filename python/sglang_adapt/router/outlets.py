"""Where the router sends what is not for an engine, and whom it tells of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_adapt.router.engine import Engine


@dataclass(frozen=True)
class Outlets:
    """Where the router sends what is not for an engine.

    Attributes:
        tokenizer: one stock message to the tokenizer manager.
        outputs: one batch of outputs on its way to the tokenizer manager (through the detokenizer, if there is one).
        ready: called with an engine that has answered its warm-up request.
        changed: called when the status has changed.
        lost: called with an engine that does not take messages any more.
        replied: called with an engine's reply to a call of the router's own (`calls.py`).
        stranded: called when requests have lost their engine.
        placing: called with a request and the engine that it is sent to next.
        taken: called with a request that an engine has now, while others are kept paused.
        long_waits: called when a request has come that no engine of the layout holds.
        ended: called with an engine whose request has ended, or gone.
    """

    tokenizer: Callable[[bytes], None]
    outputs: Callable[[bytes], None]
    ready: Callable[[Engine], None]
    changed: Callable[[], None]
    lost: Callable[[Engine], None]
    replied: Callable[[Engine, bytes], None]
    stranded: Callable[[], None] = lambda: None
    placing: Callable[[str, Engine], None] = lambda rid, engine: None
    taken: Callable[[str], None] = lambda rid: None
    long_waits: Callable[[], None] = lambda: None
    ended: Callable[[Engine], None] = lambda engine: None
