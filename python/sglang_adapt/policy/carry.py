"""What becomes of each running request in a switch of layout: where it goes, and whether its KV goes with it.

Pure decisions over frozen data. Sources: hard preemption and aggregated migration in Nitsum, 3.2.2 and 3.3; in-place
layouts in Flying Serving, 4.2. To migrate costs the copy of the KV, to recompute costs a prefill of the same tokens, to
keep costs the blocks for as long as the layout stays away, to drain costs the time until the last request has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import Role
from sglang_adapt.policy.copy_rates import COPY_BYTES_PER_S


class Strategy(StrEnum):
    """How the requests of engines that leave the layout are treated.

    AUTO: whatever is cheapest for each.
    MIGRATE: their KV is copied to the engine that goes on with them.
    KEEP: they stay where they are, blocks and all, and go on when their engine is in the layout again.
    DRAIN: the switch waits until they have ended.
    RECOMPUTE: they move without their KV, which the engine that goes on with them computes again.
    """

    AUTO = "auto"
    MIGRATE = "migrate"
    KEEP = "keep"
    DRAIN = "drain"
    RECOMPUTE = "recompute"


class NoRoomError(RuntimeError):
    """KV that was to be migrated does not fit into the free blocks of the engines that enter the layout."""


@dataclass(frozen=True, slots=True)
class Mover:
    """A request that has to leave its engine.

    Attributes:
        rid: its id.
        gpus: the GPUs of the engine that it leaves.
        kv_tokens: tokens that have KV.
        length: tokens that it has, prompt and output.
        most_tokens: that it may come to have.
    """

    rid: str
    gpus: tuple[int, ...]
    kv_tokens: int
    length: int
    most_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """An engine that can take requests up.

    Attributes:
        engine: its name.
        gpus: its GPUs.
        free_blocks: blocks on each rank that it can have.
        page: tokens of a block at its TP size.
        requests, tokens: what it has to do already.
        request_tokens: of the longest request that it holds.
        role: what it does in the layout that is entered.
    """

    engine: str
    gpus: tuple[int, ...]
    free_blocks: int
    page: int
    requests: int = 0
    tokens: int = 0
    request_tokens: int = sys.maxsize
    role: Role = Role.MIXED

    def taking(self, blocks: int, length: int) -> Room:
        """The room that is left when a request of `length` tokens has come, with so many blocks."""
        # Made anew field by field: `replace` takes three times as long, and a switch asks for each request.
        return Room(
            self.engine,
            self.gpus,
            self.free_blocks - blocks,
            self.page,
            self.requests + 1,
            self.tokens + length,
            self.request_tokens,
            self.role,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates by which strategies are compared, in tokens a second.

    Attributes:
        copy: KV copied between GPUs: the bandwidth of a way by the bytes of a token of an 8B model (128 KiB).
        prefill: tokens computed; of the order of 20,000 for an 8B model on one H100.
    """

    copy: float
    prefill: float = 2.0e4


_TOKEN_BYTES = 128 * 1024
"""Of an 8B model's KV."""


def costs_by(path: CopyPath) -> Costs:
    """With the bandwidth of a way of copies."""
    return Costs(copy=COPY_BYTES_PER_S[path] / _TOKEN_BYTES)


PEER_COSTS = costs_by(CopyPath.PEER)
"""Where each GPU reads the memory of the others."""


@dataclass(frozen=True, slots=True)
class Carriage:
    """Where a request goes on, and whether its KV is migrated (or computed again)."""

    rid: str
    engine: str
    migrate: bool


HEADROOM_BLOCKS = 1
"""Blocks that a request needs beside its KV, so that its next tokens find room before the source's blocks are free."""


def carry(
    movers: Sequence[Mover], rooms: Sequence[Room], strategy: Strategy, costs: Costs = PEER_COSTS
) -> tuple[Carriage, ...]:
    """Decide for every request that has to move, in the order given.

    Requests with much KV are placed first. A request goes to an engine on its own GPUs, where part of its KV is
    local, if there is room; of several the one with least to do. Never to one that does not hold what it may become.

    Args:
        movers: the requests; first come, first served among those without KV.
        rooms: the engines that enter the layout, at least one.
        strategy: AUTO, MIGRATE or RECOMPUTE.
        costs: for AUTO.

    Raises:
        NoRoomError: MIGRATE, and KV that does not fit; or a request that is too long for all engines.
        ValueError: no room at all, or a strategy by which nothing moves.
    """
    if not rooms or strategy in (Strategy.KEEP, Strategy.DRAIN):
        raise ValueError(f"{len(movers)} requests are to move by {strategy} to {len(rooms)} engines")
    state = {room.engine: room for room in rooms}
    chosen: dict[str, Carriage] = {}
    for mover in sorted(movers, key=lambda mover: -mover.kv_tokens):
        wanted = mover.kv_tokens > 0 and strategy is not Strategy.RECOMPUTE
        if strategy is Strategy.AUTO and mover.kv_tokens / costs.copy > mover.kv_tokens / costs.prefill:
            wanted = False
        room = _best(state.values(), mover, with_kv=True) if wanted else None
        if room is None and wanted and strategy is Strategy.MIGRATE:
            raise NoRoomError(_no_room(mover, state.values()))
        migrate = room is not None
        room = room or _best(state.values(), mover, with_kv=False)
        if room is None:
            raise NoRoomError(_too_long(mover, state.values()))
        chosen[mover.rid] = Carriage(mover.rid, room.engine, migrate)
        state[room.engine] = room.taking(_blocks(mover, room) if migrate else 0, mover.length)
    return tuple(chosen[mover.rid] for mover in movers)


def _blocks(mover: Mover, room: Room) -> int:
    return -(-mover.kv_tokens // room.page) + HEADROOM_BLOCKS


def _best(rooms: Iterable[Room], mover: Mover, *, with_kv: bool) -> Room | None:
    """The engine for a request: one in whose role it is, then on its own GPUs if possible, then the one with the least
    to do. What decodes where prompts are read holds them up for as long as it runs."""
    wrong = Role.PREFILL if with_kv else Role.DECODE
    holding = [room for room in rooms if mover.most_tokens <= room.request_tokens]
    fitting = [room for room in holding if not with_kv or _blocks(mover, room) <= room.free_blocks]
    return min(
        fitting,
        key=lambda room: (room.role is wrong, not set(room.gpus) & set(mover.gpus), room.tokens, room.engine),
        default=None,
    )


def _too_long(mover: Mover, rooms: Iterable[Room]) -> str:
    holding = ", ".join(f"{room.engine} holds {room.request_tokens}" for room in rooms)
    return (
        f"request {mover.rid} may come to have {mover.most_tokens} tokens, which is more than one request may have on "
        f"the engines that enter ({holding}); let it end first (strategy drain), keep it paused (strategy keep), or "
        f"name a layout in which its engine stays"
    )


def _no_room(mover: Mover, rooms: Iterable[Room]) -> str:
    free = ", ".join(f"{room.engine} has {room.free_blocks} of {_blocks(mover, room)}" for room in rooms)
    return (
        f"request {mover.rid} has {mover.kv_tokens} tokens of KV, for which no engine has the blocks ({free}); use the "
        f"strategy auto, which computes the KV of such requests again"
    )
