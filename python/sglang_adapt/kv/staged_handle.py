"""What the two ends of staged copies of one GPU's KV know of each other."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang_adapt.kv.plan import SourcePlan
from sglang_adapt.memory import HostHandle, RegionHandle


class StagedHandle(msgspec.Struct, frozen=True, tag="staged"):
    """Where the KV of a GPU is asked for.

    Attributes:
        address: the Unix socket of the process that sends it (`staged_server`), which takes an `Order` at a time.
        link: the two link buffers, one behind the other.
    """

    address: str
    link: HostHandle


KvHandle = RegionHandle | StagedHandle
"""How the KV of a GPU is reached: its memory, or who sends it."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Receiver to sender: carry this plan out.

    Attributes:
        plan: from the sender's GPU to the receiver's.
        ahead: nobody waits for it, and it leaves most of the GPU to what runs there.
    """

    plan: SourcePlan
    ahead: bool
