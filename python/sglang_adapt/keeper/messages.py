"""What a keeper tells the process that started it, over its pipe."""

from __future__ import annotations

import msgspec

from sglang_adapt.kv.staged_handle import StagedHandle
from sglang_adapt.memory import RegionHandle
from sglang_adapt.weights import WeightsHandle


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the loading of the weights has come; the first one is sent before anything is loaded.

    Attributes:
        done_bytes: loaded so far.
        total_bytes: size of the store.
    """

    done_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Everything is in place.

    Attributes:
        weights: the filled store; None for a keeper without weights.
        regions: handles by name and GPU id.
        staged: by GPU id, where its KV is asked for; empty if it is read.
        seconds: from the start of the process until now.
    """

    weights: WeightsHandle | None
    regions: dict[str, dict[int, RegionHandle]]
    seconds: float
    staged: dict[int, StagedHandle] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The keeper could not do it and ends.

    Attributes:
        error: type and text of the exception.
    """

    error: str


KeeperMessage = Progress | Ready | Failed

_decoder = msgspec.msgpack.Decoder(KeeperMessage)


def encode(message: KeeperMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> KeeperMessage:
    """Raises msgspec.ValidationError if `data` is no keeper's message."""
    return _decoder.decode(data)
