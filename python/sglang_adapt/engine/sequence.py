"""The router's call `sequence`: how many batches of an engine ran each way, and from how many tokens on."""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.sequence.mode import SequenceModeError, current_mode


def sequence(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """What the rank's model says; with a threshold, which holds from the next batch on.

    Args:
        payload: `tokens`, if it is to be another one: of a batch from which it runs sequence-parallel; None: never.

    Returns:
        `SequenceMode.said()`.

    Raises:
        SequenceModeError: the engine cannot run so, or not with this threshold; nothing has changed.
    """
    mode = current_mode()
    if mode is None:
        raise SequenceModeError("this engine runs all its batches tensor-parallel; start the server with --adapt-sp")
    if "tokens" in payload:
        mode.set_threshold(payload["tokens"])
    return mode.said()
