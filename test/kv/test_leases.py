"""Leases over the GPUs of a node: whole engines or nothing, and the errors of the router's side."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_adapt.kv.blocks import BlockLedger, BlockState, NoFreeBlocksError, StaleEpochError
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.leases import EngineRanks, Leases, PoolTooSmallError, require_fits
from sglang_adapt.kv.ledger_format import LedgerError, ledger_bytes
from sglang_adapt.kv.plan import CopyBatch, RequestCopy

GEOMETRY = PoolGeometry(layers=1, kv_heads=4, head_dim=8, itemsize=2, finest_tp=2, block_bytes=4 * 4 * 16, blocks=11)
ONE = EngineRanks(1, "tp1@1", (1,))
TWO = EngineRanks(2, "tp2@0-1", (0, 1))


def node() -> tuple[Leases, dict[int, BlockLedger]]:
    ledgers = {gpu: BlockLedger(bytearray(ledger_bytes(GEOMETRY)), GEOMETRY, gpu, "run") for gpu in (0, 1)}
    return Leases(ledgers), ledgers


def test_ranks_hold_equally_many_blocks_of_different_ids() -> None:
    leases, _ = node()
    leases.grow(ONE, 3, 0)
    lease = leases.grow(TWO, 4, 0)
    assert lease.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert leases.lease(TWO).tolist() == lease.tolist()
    assert (leases.free(ONE), leases.free(TWO)) == (3, 3)
    leases.check([ONE, TWO])


def test_an_engine_that_finds_no_room_on_one_gpu_takes_nothing_on_the_others() -> None:
    leases, ledgers = node()
    leases.grow(ONE, 8, 0)
    with pytest.raises(NoFreeBlocksError, match="GPU 1: 3 blocks were asked for, 2 of 11 are free"):
        leases.grow(TWO, 3, 0)
    with pytest.raises(NoFreeBlocksError, match="GPU 1"):
        leases.reserve(TWO, 3, 0)
    assert ledgers[0].count(BlockState.FREE) == 10
    leases.check([ONE, TWO])


def test_a_change_that_one_gpu_refuses_is_made_on_none() -> None:
    leases, ledgers = node()
    lease = leases.grow(TWO, 3, 5)
    ledgers[1].take(0, 1, BlockState.LEASED, 6)
    changes = [
        lambda: leases.shrink(TWO, lease, 5),
        lambda: leases.grow(TWO, 1, 5),
        lambda: leases.engine_died(TWO, 5),
    ]
    for change in changes:
        with pytest.raises(StaleEpochError, match="GPU 1"):
            change()
    with pytest.raises(LedgerError, match="GPU 1: block 9 is free"):
        leases.export(TWO, [lease[0].tolist(), [1, 2, 9]], 6)
    with pytest.raises(LedgerError, match=r"tp2@0-1: \[3, 2\] blocks are named for its ranks; 2 equal counts"):
        leases.export(TWO, [[1, 2, 3], [1, 2]], 6)
    with pytest.raises(LedgerError, match=r"tp2@0-1: \[3\] blocks"):
        leases.export(TWO, [[1, 2, 3]], 6)
    with pytest.raises(LedgerError, match="GPU 7 has no ledger"):
        leases.grow(EngineRanks(3, "tp1@7", (7,)), 1, 6)
    assert ledgers[0].epoch == 5
    assert leases.lease(TWO).tolist() == lease.tolist()
    leases.check([TWO])


def test_unequal_ranks_are_found() -> None:
    leases, ledgers = node()
    leases.grow(TWO, 3, 0)
    ledgers[1].move([1], TWO.number, BlockState.LEASED, BlockState.FREE, 0)
    with pytest.raises(LedgerError, match=r"ranks of tp2@0-1 have \[3, 2\] blocks leased"):
        leases.check([TWO])


def test_a_request_that_the_pool_never_fits_is_refused_with_what_fits() -> None:
    assert require_fits(GEOMETRY, TWO, 80) == 10
    with pytest.raises(
        PoolTooSmallError,
        match=r"tp2@0-1: a request of 81 tokens needs 11 blocks, the pool has 10; at TP 2 at most 80 tokens fit",
    ):
        require_fits(GEOMETRY, TWO, 81)
    with pytest.raises(PoolTooSmallError, match="at TP 1 at most 40 tokens fit"):
        require_fits(GEOMETRY, ONE, 41)


def test_requests_may_share_what_they_read_but_not_what_they_write() -> None:
    leases, ledgers = node()
    lease = leases.grow(ONE, 3, 0)
    there = leases.reserve(TWO, 2, 0)

    def batch(second: np.ndarray) -> list[CopyBatch]:
        requests = (
            RequestCopy("a", 8, lease[:, :2], there[:, :1]),
            RequestCopy("b", 8, lease[:, [0, 2]], second),
        )
        return [CopyBatch(ONE.gpus, TWO.gpus, requests)]

    with pytest.raises(LedgerError, match="GPU 0: block 1 would be written for two requests"):
        leases.begin_copy(batch(there[:, :1]), 0)
    assert not ledgers[1]._memory.copies.any()
    ticket = leases.begin_copy(batch(there[:, 1:]), 0)
    assert ticket.reads[1].tolist() == [1, 2, 3]
    assert [ticket.writes[gpu].tolist() for gpu in (0, 1)] == there.tolist()
    leases.export(ONE, lease, 0)
    leases.release(ONE, lease, 0)
    assert ledgers[1].count(BlockState.QUARANTINED) == 3
    leases.end_copy(ticket, 0)
    assert ledgers[1].count(BlockState.QUARANTINED) == 0
    with pytest.raises(LedgerError, match="in no copy that could end"):
        leases.end_copy(ticket, 0)
    leases.adopt(TWO, there, 0)
    leases.check([ONE, TWO])
