"""Bringing over what does not change any more, while all requests run: pre-copy, as in the live migration of machines.

Source: Clark et al., "Live Migration of Virtual Machines", 2005. One round: the engines that leave say what their
requests consist of and give free blocks back; the engines that enter make the requests and copy their KV. What is left
for the pause is what has come since. Nothing here is needed: whatever fails or does not fit moves in the pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from sglang_adapt.core.block_ids import unpack_ids
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.handoff import (
    CarriedRequest,
    KvSource,
    PrecopyAnswer,
    PrecopyCall,
    RequestKind,
    SnapshotAnswer,
    SnapshotCall,
)
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.kv.plan import CopyBatch, IntArray, RequestCopy, batches_to
from sglang_adapt.policy.carry import HEADROOM_BLOCKS, Carriage, Mover, Room
from sglang_adapt.router.asking import ask_handoff
from sglang_adapt.router.calls import EngineCallError
from sglang_adapt.router.copying import by_rank, copy_into, share_out
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.switch import Sent, Snapshot, Switch

logger = logging.getLogger(__name__)

LEAVE_TOKENS = 256
"""Tokens that each request of an engine can still come to have, in blocks that the engine keeps. It runs on meanwhile,
for milliseconds as a rule, and stock retracts requests, or aborts the last one, where no block is free."""
STAGED_LEAVE_TOKENS = 512
"""The same where KV is staged: at 5 ms a step 2.5 s, in which 50 GB leave a GPU."""


def leave_tokens(path: CopyPath) -> int:
    """How much room requests need while KV is brought over by a way."""
    return STAGED_LEAVE_TOKENS if path is CopyPath.STAGED else LEAVE_TOKENS


Carry = Callable[[Sequence[Mover], Sequence[Room]], Sequence[Carriage]]


class Precopy:
    """What has been brought over ahead in one switch, and whose blocks hold it.

    Args:
        pools: whose blocks are whose, and the way to the engines' ranks.
        up: which engines are.
        leave: tokens that each request can still come to have in blocks that its engine keeps.
    """

    def __init__(self, pools: Pools, up: Lives, leave: int) -> None:
        self._leave = leave
        self._pools = pools
        self._up = up
        self._snapshots: dict[tuple[EngineSpec, str], Snapshot] = {}
        self._sent: dict[str, Sent] = {}

    async def run(
        self, switch: Switch, sources: Mapping[EngineSpec, int], room: Callable[[EngineSpec], Room], carry: Carry
    ) -> None:
        """Bring over what can be.

        Args:
            sources: engines that leave, and how many requests they have.
            room: of an engine that enters.
            carry: decides where requests go.
        """
        await asyncio.gather(*(self._ask(switch, spec, count) for spec, count in sources.items()))
        movers = [
            Mover(
                rid,
                tuple(spec.gpus),
                max(1, snapshot.request.ahead),
                snapshot.request.length,
                snapshot.request.most_tokens,
            )
            for (spec, rid), snapshot in self._snapshots.items()
        ]
        if not movers:
            return
        specs = {spec.name: spec for spec in switch.entering}
        by_rid = {rid: (spec, snapshot) for (spec, rid), snapshot in self._snapshots.items()}
        going: dict[EngineSpec, list[tuple[EngineSpec, Snapshot]]] = {}
        for carriage in carry(movers, [room(spec) for spec in switch.entering]):
            if carriage.migrate:
                going.setdefault(specs[carriage.engine], []).append(by_rid[carriage.rid])
        await asyncio.gather(*(self._send(switch, spec, group) for spec, group in going.items()))

    async def _ask(self, switch: Switch, spec: EngineSpec, requests: int) -> None:
        pools = self._pools
        each = -(-self._leave // pools.settings.geometry.tokens_per_block(spec.tp))
        call = SnapshotCall(switch.epoch, pools.unit_tokens, each * requests + pools.settings.standby_blocks)
        try:
            answers = await ask_handoff(pools, spec, call, SnapshotAnswer)
        except EngineCallError as error:
            # If it is dead, its export finds out; if it has refused, its requests move in the pause.
            logger.warning("%s: nothing is copied ahead: %s", spec, error)
            return
        switch.note_steps("precopy", (answer.steps_ms for answer in answers))
        pools.given(spec, np.stack([unpack_ids(answer.given) for answer in answers]))
        for at, request in enumerate(answers[0].requests):
            self._snapshots[spec, request.rid] = Snapshot(request, [answer.blocks[at] for answer in answers])

    async def _send(self, switch: Switch, spec: EngineSpec, group: Sequence[tuple[EngineSpec, Snapshot]]) -> None:
        if not self._up.is_up(spec):
            # Dead since the switch began, perhaps gone already: nothing may wait for that.
            return
        pools, deaths = self._pools, self._pools.deaths(spec)
        page = pools.settings.geometry.tokens_per_block(spec.tp)
        counts = [snapshot.request.ahead // page for _, snapshot in group]
        try:
            reserved = pools.reserve(spec, sum(counts))
        except LedgerError as error:
            logger.warning("%s: nothing is copied ahead: %s", spec, error)
            return
        shares = share_out(reserved, counts)
        call = PrecopyCall(
            switch.epoch,
            [snapshot.request for _, snapshot in group],
            by_rank(shares, spec.tp),
            [KvSource(list(source.gpus), snapshot.blocks) for source, snapshot in group],
        )
        try:
            answers = await copy_into(
                pools,
                spec,
                _copies(spec, group, shares),
                ask=lambda: ask_handoff(pools, spec, call, PrecopyAnswer),
                give_up=lambda: pools.cancel(spec, reserved),
            )
        except EngineCallError as error:
            logger.warning("%s: nothing is copied ahead: %s", spec, error)
            return
        switch.note_steps("precopy", (answer.steps_ms for answer in answers))
        for (_, snapshot), mine in zip(group, shares, strict=True):
            self._sent[snapshot.request.rid] = Sent(snapshot, spec, deaths, mine)
            switch.ahead_tokens += snapshot.request.ahead

    # In the pause.

    def blocks(self, spec: EngineSpec, request: CarriedRequest, rank: int) -> list[int]:
        """A rank's blocks of the tokens in `ahead` of a request that an engine has handed out."""
        return self._snapshots[spec, request.rid].blocks[rank] if request.ahead else []

    def whole(self, spec: EngineSpec, request: CarriedRequest) -> CarriedRequest:
        """The message of a request for an engine that has got nothing ahead."""
        there = self._snapshots.get((spec, request.rid))
        return request if there is None else request.from_snapshot(there.request.state)

    def place(self, requests: Iterable[CarriedRequest], rooms: Sequence[Room]) -> dict[str, Sent]:
        """Which requests go on where they were sent; the blocks of all others that were sent are free.

        Args:
            requests: as they were handed out, by engines that live.
            rooms: of the engines that enter.
        """
        state = {room.engine: room for room in rooms}
        deaths = {sent.spec: self._pools.deaths(sent.spec) for sent in self._sent.values()}
        placed: dict[str, Sent] = {}
        for request in requests:
            sent = self._sent.get(request.rid)
            if sent is None or deaths[sent.spec] != sent.deaths:
                continue
            if request.kind is not RequestKind.RUNNING or request.ahead != sent.snapshot.request.ahead:
                continue
            room = state[sent.spec.name]
            needed = self.needs(request, sent, room)
            if needed <= room.free_blocks:
                placed[request.rid] = sent
                state[room.engine] = room.taking(needed, request.length)
        self._keep_only(placed)
        return placed

    def needs(self, request: CarriedRequest, sent: Sent, room: Room) -> int:
        """Blocks on each rank that a request still needs where it was sent."""
        return -(-request.kv_tokens // room.page) - sent.pages.shape[1] + HEADROOM_BLOCKS

    def taken(self, rids: Iterable[str]) -> None:
        """An engine has taken requests up, or nobody knows whether it has: their blocks are not ours to give back."""
        for rid in rids:
            self._sent.pop(rid, None)

    def drop(self) -> None:
        """What was sent and not taken up is not needed: its blocks are free."""
        self._keep_only({})

    def _keep_only(self, placed: Mapping[str, Sent]) -> None:
        for rid in [rid for rid in self._sent if rid not in placed]:
            sent = self._sent.pop(rid)
            if self._pools.deaths(sent.spec) == sent.deaths and sent.pages.size:
                self._pools.cancel(sent.spec, sent.pages)


def _copies(
    spec: EngineSpec, group: Sequence[tuple[EngineSpec, Snapshot]], shares: Sequence[IntArray]
) -> list[CopyBatch]:
    copies: list[tuple[Sequence[int], RequestCopy]] = []
    for (source, snapshot), mine in zip(group, shares, strict=True):
        if snapshot.request.ahead:
            blocks = np.asarray(snapshot.blocks, dtype=np.int32)
            copies.append((source.gpus, RequestCopy(snapshot.request.rid, snapshot.request.ahead, blocks, mine)))
    return batches_to(tuple(spec.gpus), copies)
