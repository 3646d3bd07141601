"""The router's call `reload_weights`: read the weights again, as a system without one copy of them would."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from sglang_adapt.upstream.weights.again import read_again


def reload_weights(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Read the checkpoint again and send this rank's part of it to its GPU; what is there stays, as it is the same.

    Returns:
        `bytes`: that were read and sent; `steps_ms`: what it took, as `reload`.

    Raises:
        NotReadError: there is no checkpoint; nothing has changed.
    """
    began = perf_counter()
    sent = read_again(scheduler.server_args, rank)
    return {"bytes": sent, "steps_ms": {"reload": 1e3 * (perf_counter() - began)}}
