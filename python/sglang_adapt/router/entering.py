"""The engines that enter the layout: they go on with what they had kept, then copy and take up what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from sglang_adapt.core.block_ids import pack_ids
from sglang_adapt.core.handoff import AdoptAnswer, AdoptCall, KvSource
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.kv.plan import CopyBatch, IntArray, RequestCopy, batches_to
from sglang_adapt.router.asking import ask_handoff
from sglang_adapt.router.calls import CallRefusedError, EngineCallError, EngineGoneError
from sglang_adapt.router.copying import by_rank, copy_into, share_out
from sglang_adapt.router.kept import Kept
from sglang_adapt.router.leaving import Leaving
from sglang_adapt.router.lives import Lives
from sglang_adapt.router.pools import Pools
from sglang_adapt.router.precopy import LEAVE_TOKENS, Precopy
from sglang_adapt.router.router import Router
from sglang_adapt.router.switch import Arrival, Switch, SwitchRefusedError

LENT_TOKENS = 65536
"""Tokens for which an engine gets free blocks together with its requests, beside `LEAVE_TOKENS` for each of these. It
gets all others right after, so that nobody waits longer in a larger pool; until then this is room for the next tokens
and for some prompts."""


class Entering:
    """See the module.

    Args:
        router: where requests are.
        pools: whose blocks are whose, and the way to the engines' ranks.
        up: which engines are.
        kept: what engines outside the layout hold.
        leaving: lets an engine go on with what it had kept.
    """

    def __init__(self, router: Router, pools: Pools, up: Lives, kept: Kept, leaving: Leaving) -> None:
        self._router = router
        self._pools = pools
        self._up = up
        self._kept = kept
        self._leaving = leaving

    async def read_weights_again(self, switch: Switch) -> None:
        """For measurements: let all engines that enter do so. Raises SwitchRefusedError if one cannot."""
        results = await asyncio.gather(
            *(self._pools.ask(spec, "reload_weights", {}) for spec in switch.entering), return_exceptions=True
        )
        for spec, result in zip(switch.entering, results, strict=True):
            if isinstance(result, EngineCallError):
                raise SwitchRefusedError(f"engine {spec} has not read its weights again: {result}") from result
            if isinstance(result, BaseException):
                raise result
            switch.note_steps("reload", (answer["steps_ms"] for answer in result))

    async def take_up(
        self, switch: Switch, arrivals: Mapping[EngineSpec, Sequence[Arrival]], precopy: Precopy
    ) -> list[EngineSpec]:
        """Let every engine that enters take its requests up, those first that it had kept; returns those that did."""
        results = await asyncio.gather(
            *(self._enter(switch, spec, arrivals.get(spec, ()), precopy) for spec in switch.entering),
            return_exceptions=True,
        )
        served = []
        for spec, result in zip(switch.entering, results, strict=True):
            if result is None:
                served.append(spec)
            elif isinstance(result, EngineCallError):
                switch.failures.append(f"{spec} could not take its requests up: {result}")
            elif isinstance(result, BaseException):
                raise result
        return served

    async def _enter(self, switch: Switch, spec: EngineSpec, arrivals: Sequence[Arrival], precopy: Precopy) -> None:
        """Let an engine go on with what it had kept, then take up what arrives.

        In this order, because a prompt that is read in chunks can go on only where no other one is. Raises as `_adopt`.
        """
        kept = self._kept.exports.pop(spec, None)
        if kept is None:
            await self._adopt(switch, spec, arrivals, precopy)
            return
        self._router.unkeep(self._router.engines[spec.name])
        try:
            resumed = await self._leaving.restore(kept, sum(self._blocks(spec, arrivals)))
        except EngineCallError as error:
            switch.failures.append(f"{spec} did not go on with what it had kept: {error}")
            self._router.strand(self._router.moving, kept.rids, str(error))
            resumed = []
        switch.requests["resumed"] += len(resumed)
        try:
            await self._adopt(switch, spec, arrivals, precopy)
        except CallRefusedError as error:
            # It runs requests again, but may stay outside the layout, where it has no blocks for them.
            self._pools.kill(spec, str(error))
            raise

    def _blocks(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> list[int]:
        """Blocks on each rank that each of the arrivals needs, beside those that hold what was copied ahead."""
        page = self._pools.settings.geometry.tokens_per_block(spec.tp)
        return [arrival.blocks(page) for arrival in arrivals]

    async def _adopt(self, switch: Switch, spec: EngineSpec, arrivals: Sequence[Arrival], precopy: Precopy) -> None:
        """Reserve blocks, let the engine copy and take up, and note it in the ledgers.

        Raises:
            CallRefusedError: nothing has changed.
            EngineCallError: the engine is gone, and what it had with it.
        """
        pools = self._pools
        if not self._up.is_up(spec):
            raise EngineGoneError(f"{spec} has died since the switch began")
        counts = self._blocks(spec, arrivals)
        try:
            reserved = pools.reserve(spec, sum(counts))
        except LedgerError as error:
            raise CallRefusedError(f"{spec}: {error}") from error
        page = pools.settings.geometry.tokens_per_block(spec.tp)
        soon = -(-(LENT_TOKENS + LEAVE_TOKENS * len(arrivals)) // page)
        lent = pools.lend(spec, min(soon, pools.available(spec)))
        shares = share_out(reserved, counts)
        sources = [arrival.kv_source for arrival in arrivals]
        call = AdoptCall(
            switch.epoch,
            [arrival.request for arrival in arrivals],
            by_rank(shares, spec.tp),
            sources=sources,
            grow=[pack_ids(rank) for rank in lent],
        )
        answers = await copy_into(
            pools,
            spec,
            _copies(spec, arrivals, sources, shares),
            ask=lambda: ask_handoff(pools, spec, call, AdoptAnswer),
            give_up=lambda: pools.refused(spec, reserved, lent),
        )
        switch.note_steps("adopt", (answer.steps_ms for answer in answers))
        ahead = [arrival.sent.pages for arrival in arrivals if arrival.sent is not None]
        pools.adopted(spec, np.concatenate([reserved, *ahead], axis=1))
        precopy.taken(arrival.request.rid for arrival in arrivals)
        self._router.attach(self._router.engines[spec.name], answers[0].adopted)


def _copies(
    spec: EngineSpec, arrivals: Sequence[Arrival], sources: Sequence[KvSource], shares: Sequence[IntArray]
) -> list[CopyBatch]:
    """The copies that bring the arrivals' KV to an engine, for the ledgers."""
    copies: list[tuple[Sequence[int], RequestCopy]] = []
    for arrival, source, mine in zip(arrivals, sources, shares, strict=True):
        request = arrival.request
        if arrival.source is not None and request.kv_tokens > request.ahead:
            blocks = np.asarray(source.blocks, dtype=np.int32)
            copies.append((source.gpus, RequestCopy(request.rid, request.kv_tokens, blocks, mine, request.ahead)))
    return batches_to(tuple(spec.gpus), copies)
