"""KV that an engine copies into blocks set aside for it: who gets which blocks, and how such a copy ends.

A switch copies so, ahead of its pause (`precopy.py`) and in it (`entering.py`). In a hand-over (`moves.py`) the
taker writes into its own lease, so that only what is read is noted, and the copy outlasts the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.kv.ledger_format import LedgerError
from sglang_adapt.kv.plan import CopyBatch, IntArray
from sglang_adapt.router.calls import CallRefusedError, EngineCallError
from sglang_adapt.router.pools import Pools

Blocks = list[list[int]]
"""Blocks of one request in token order, a list a rank."""

Answer = TypeVar("Answer")


def share_out(reserved: IntArray, counts: Sequence[int]) -> list[IntArray]:
    """The blocks of each request, `[TP size, count]`, out of those reserved for all, `[TP size, sum of counts]`."""
    ends = np.cumsum([0, *counts]).tolist()
    assert ends[-1] == reserved.shape[1], f"{reserved.shape[1]} blocks are reserved for requests that need {ends[-1]}"
    return [reserved[:, start:end] for start, end in pairwise(ends)]


def by_rank(shares: Sequence[IntArray], ranks: int) -> list[Blocks]:
    """The blocks of requests, `[request][rank, n]`, as a message to all ranks has them: `[rank][request][n]`."""
    return [[mine[rank].tolist() for mine in shares] for rank in range(ranks)]


async def copy_into(
    pools: Pools,
    spec: EngineSpec,
    batches: Sequence[CopyBatch],
    ask: Callable[[], Awaitable[Answer]],
    give_up: Callable[[], None],
) -> Answer:
    """Let an engine copy, and note it in the ledgers for as long as it may do so.

    It ends in one of three ways: the engine has answered, so nothing is copied any more; it is gone, and all that it
    had with it; or nobody knows, after a fault in this program, and the copy ends with the engine, which is killed.

    Args:
        pools: whose blocks are whose.
        spec: the engine that copies.
        batches: what is read, and what is written.
        ask: tells the engine to; its answer comes when all has been copied. Raises EngineCallError.
        give_up: frees the blocks that were set aside for it; called if it has refused, and lives.

    Raises:
        CallRefusedError: nothing has changed: the engine has refused, or a source has died since this was planned.
        EngineCallError: the engine is gone.
    """
    deaths = pools.deaths(spec)
    try:
        ticket = pools.begin_copy(batches)
    except LedgerError as error:
        give_up()
        raise CallRefusedError(f"{spec}: {error}") from error
    try:
        answer = await ask()
    except EngineCallError as error:
        if not isinstance(error, CallRefusedError):
            await pools.gone(spec, deaths)
        pools.end_copy(ticket)
        if pools.deaths(spec) == deaths:
            give_up()
        raise
    except Exception:
        pools.end_copy_when_gone(spec, deaths, ticket)
        raise
    pools.end_copy(ticket)
    return answer
