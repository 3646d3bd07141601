"""The ledger of one GPU: what may change into what, copies in flight, readers, and ledgers of other runs."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable

import numpy as np
import pytest

from sglang_adapt.kv.blocks import BlockLedger, BlockState, NoFreeBlocksError, StaleEpochError
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.ledger_format import ForeignLedgerError, LedgerError, ledger_bytes
from sglang_adapt.kv.ledger_reader import LedgerReader
from sglang_adapt.memory import allocate, attach

GEOMETRY = PoolGeometry(layers=2, kv_heads=4, head_dim=8, itemsize=2, finest_tp=4, block_bytes=64, blocks=20)
RUN = "0123456789abcdef0123456789abcdef"
NONE = np.zeros(0, dtype=np.int32)
FREE, LEASED, EXPORTED, RESERVED, QUARANTINED = (
    BlockState.FREE,
    BlockState.LEASED,
    BlockState.EXPORTED,
    BlockState.RESERVED,
    BlockState.QUARANTINED,
)


def buffer() -> bytearray:
    return bytearray(ledger_bytes(GEOMETRY))


def new_ledger() -> BlockLedger:
    return BlockLedger(buffer(), GEOMETRY, 0, RUN)


def test_an_empty_ledger_has_all_blocks_free_but_the_dummy() -> None:
    ledger = new_ledger()
    assert ledger.check() == dict.fromkeys(BlockState, 0) | {FREE: 19, BlockState.DUMMY: 1}
    assert ledger.take(19, 1, LEASED, 0).tolist() == list(range(1, 20))
    with pytest.raises(NoFreeBlocksError, match="GPU 0: 1 blocks were asked for, 0 of 20 are free"):
        ledger.take(1, 1, LEASED, 0)


def test_blocks_go_the_way_of_a_switch() -> None:
    ledger = new_ledger()
    lease = ledger.take(6, 1, LEASED, 1)
    ledger.move(lease[:4], 1, LEASED, EXPORTED, 2)
    there = ledger.take(3, 2, RESERVED, 2)
    ledger.begin_copy(lease[:4], there, 2)
    ledger.end_copy(lease[:4], there, 2)
    ledger.move(there, 2, RESERVED, LEASED, 3)
    ledger.move(lease[:4], 1, EXPORTED, FREE, 3)
    ledger.move(lease[4:], 1, LEASED, FREE, 3)
    assert ledger.ids(LEASED).tolist() == ledger.ids(LEASED, 2).tolist() == there.tolist()
    assert ledger.count(FREE) == 16
    ledger.check()


def test_only_changes_that_blocks_make_are_allowed() -> None:
    ledger = new_ledger()
    lease = ledger.take(4, 1, LEASED, 0)
    for before, after in [(LEASED, RESERVED), (FREE, LEASED), (QUARANTINED, FREE), (EXPORTED, RESERVED)]:
        with pytest.raises(LedgerError, match="cannot become"):
            ledger.move(lease, 1, before, after, 0)
    with pytest.raises(LedgerError, match="not exported"):
        ledger.take(1, 1, EXPORTED, 0)
    for ids, engine, message in [
        ([1, 7], 1, "block 7 is free, not leased with engine 1"),
        ([1], 2, "block 1 is leased with engine 1, not leased with engine 2"),
        ([0], 1, "block 0 is dummy"),
        ([20], 1, "block 20 does not exist"),
        ([-1], 1, "block -1 does not exist"),
        ([2, 1, 2], 1, "block 2 is named twice"),
        ([[1]], 1, "one-dimensional"),
    ]:
        with pytest.raises(LedgerError, match=message):
            ledger.move(ids, engine, LEASED, FREE, 0)
    for engine in (0, -1, 70000):
        with pytest.raises(LedgerError, match="engine number"):
            ledger.take(1, engine, LEASED, 0)
    assert ledger.ids(LEASED, 1).tolist() == lease.tolist()
    ledger.check()


@pytest.mark.parametrize("how", ["abort", "source dies", "destination dies", "shrink"])
def test_a_block_in_a_copy_is_never_free_before_the_copy_has_ended(how: str) -> None:
    ledger = new_ledger()
    source = ledger.take(3, 1, LEASED, 0)
    if how != "shrink":
        ledger.move(source, 1, LEASED, EXPORTED, 0)
    dest = ledger.take(2, 2, RESERVED, 0)
    ledger.begin_copy(source, dest, 0)
    if how == "abort":
        ledger.move(source, 1, EXPORTED, FREE, 1)
        ledger.move(dest, 2, RESERVED, FREE, 1)
        quarantined = 5
    elif how == "shrink":
        ledger.move(source, 1, LEASED, FREE, 1)
        quarantined = 3
    else:
        quarantined = ledger.return_all(1 if how == "source dies" else 2, 1)
        assert quarantined == (3 if how == "source dies" else 2)
    assert ledger.check()[QUARANTINED] == quarantined
    assert not np.isin(ledger.take(10, 3, LEASED, 1), np.concatenate([source, dest])).any()
    assert ledger.end_copy(source, dest, 1) == quarantined
    assert ledger.check()[QUARANTINED] == 0
    assert ledger.count(FREE) == 19 - 10 - (5 - quarantined)


def test_a_block_read_by_two_copies_is_freed_by_the_later_end() -> None:
    ledger = new_ledger()
    shared = ledger.take(1, 1, LEASED, 0)
    first, second = ledger.take(1, 2, RESERVED, 0), ledger.take(1, 2, RESERVED, 0)
    ledger.begin_copy(shared, first, 0)
    ledger.begin_copy(shared, second, 0)
    ledger.move(shared, 1, LEASED, FREE, 0)
    assert ledger.end_copy(shared, first, 0) == 0
    assert ledger.ids(QUARANTINED).tolist() == shared.tolist()
    assert ledger.end_copy(shared, second, 0) == 1


def test_copies_write_reserved_blocks_once_and_adoption_waits_for_their_end() -> None:
    ledger = new_ledger()
    lease, there = ledger.take(2, 1, LEASED, 0), ledger.take(2, 2, RESERVED, 0)
    with pytest.raises(LedgerError, match="block 1 is leased with engine 1; copies write reserved blocks"):
        ledger.begin_copy(lease, lease, 0)
    with pytest.raises(LedgerError, match="block 3 is reserved with engine 2; it has nothing to copy"):
        ledger.begin_copy(there, there, 0)
    with pytest.raises(LedgerError, match="block 3 would be written for two requests"):
        ledger.begin_copy(lease, there[[0, 0]], 0)
    with pytest.raises(LedgerError, match="block 1 is in no copy"):
        ledger.end_copy(lease, there, 0)
    ledger.begin_copy(lease, there, 0)
    with pytest.raises(LedgerError, match="block 3 is in another copy"):
        ledger.begin_copy(lease, there[:1], 0)
    with pytest.raises(LedgerError, match="block 3 is being copied"):
        ledger.move(there, 2, RESERVED, LEASED, 0)
    ledger.end_copy(lease, there, 0)
    with pytest.raises(LedgerError, match="block 1 is in no copy"):
        ledger.end_copy(lease, there, 0)
    ledger.move(there, 2, RESERVED, LEASED, 0)


def test_the_blocks_of_a_dead_engine_come_back_and_those_of_others_stay() -> None:
    ledger = new_ledger()
    ledger.take(5, 1, LEASED, 0)
    other = ledger.take(4, 2, LEASED, 0)
    ledger.move([1, 2], 1, LEASED, EXPORTED, 0)
    ledger.take(3, 1, RESERVED, 0)
    assert ledger.return_all(1, 1) == 8
    assert ledger.ids(LEASED).tolist() == other.tolist()
    assert ledger.count(FREE) == 15
    assert ledger.return_all(1, 1) == 0


def test_a_stale_epoch_changes_nothing() -> None:
    ledger = new_ledger()
    ledger.take(2, 1, LEASED, 7)
    changes: list[Callable[[], object]] = [
        lambda: ledger.take(1, 1, LEASED, 6),
        lambda: ledger.move([1], 1, LEASED, FREE, 6),
        lambda: ledger.return_all(1, 6),
        lambda: ledger.begin_copy(np.array([1], dtype=np.int32), NONE, 6),
    ]
    for change in changes:
        with pytest.raises(StaleEpochError, match="change of epoch 6 came after one of epoch 7"):
            change()
    assert ledger.ids(LEASED, 1).tolist() == [1, 2]
    assert ledger.epoch == 7
    assert ledger.check()[LEASED] == 2


@pytest.mark.parametrize(
    ("column", "block", "value", "message"),
    [
        ("state", 3, 77, "block 3 has an unknown state"),
        ("state", 3, BlockState.DUMMY, "block 3 is not the dummy or should be"),
        ("state", 0, FREE, "block 0 is not the dummy or should be"),
        ("state", 3, LEASED, "block 3 is owned, but by no engine"),
        ("owner", 3, 9, "block 3 has an owner, but belongs to no one"),
        ("copies", 3, 1, "block 3 is free while a copy uses it"),
        ("state", 3, QUARANTINED, "block 3 is quarantined without a copy"),
        ("stamp", 3, 99, "block 3 was changed in an epoch to come"),
    ],
)
def test_check_names_the_block_that_is_wrong(column: str, block: int, value: int, message: str) -> None:
    ledger = new_ledger()
    getattr(ledger._memory, column)[block] = value
    with pytest.raises(LedgerError, match=message):
        ledger.check()


def test_readers_see_what_the_writer_did_in_shared_memory() -> None:
    with allocate(ledger_bytes(GEOMETRY), "cpu") as region:
        ledger = BlockLedger(region.tensor.numpy(), GEOMETRY, 0, RUN)
        with attach(region.handle) as mapped:
            reader = LedgerReader(mapped.tensor.numpy(), GEOMETRY, 0, RUN)
            ledger.take(3, 5, LEASED, 4)
            snapshot = reader.snapshot()
            assert snapshot.ids(LEASED, 5).tolist() == [1, 2, 3]
            assert snapshot.epoch == 4
            assert snapshot.stamp[:5].tolist() == [0, 4, 4, 4, 0]
            assert snapshot.counts() == ledger.check()


def test_a_ledger_of_another_run_is_refused_by_writer_and_reader() -> None:
    memory = buffer()
    BlockLedger(memory, GEOMETRY, 0, "older").take(2, 1, LEASED, 0)
    with pytest.raises(ForeignLedgerError, match=r"holds the ledger of run older, written by process \d+; stop"):
        BlockLedger(memory, GEOMETRY, 0, RUN)
    with pytest.raises(ForeignLedgerError, match=f"is that of run older .*not of this run {RUN}"):
        LedgerReader(memory, GEOMETRY, 0, RUN)
    ledger = BlockLedger(memory, GEOMETRY, 0, RUN, overwrite=True)
    assert ledger.check()[FREE] == 19
    assert LedgerReader(memory, GEOMETRY, 0, RUN).snapshot().counts()[FREE] == 19


def test_what_is_not_this_ledger_is_refused() -> None:
    memory = buffer()
    with pytest.raises(ForeignLedgerError, match="holds no ledger"):
        LedgerReader(memory, GEOMETRY, 0, RUN)
    with pytest.raises(LedgerError, match=r"needs \d+ bytes for 20 blocks, the buffer has 10"):
        BlockLedger(bytearray(10), GEOMETRY, 0, RUN)
    with pytest.raises(LedgerError, match="read-only"):
        BlockLedger(bytes(memory), GEOMETRY, 0, RUN)
    for name in ("", "x" * 33, "läuft"):
        with pytest.raises(LedgerError, match="32 ASCII"):
            BlockLedger(memory, GEOMETRY, 0, name)
    ledger = BlockLedger(memory, GEOMETRY, 0, RUN)
    with pytest.raises(ForeignLedgerError, match="is that of GPU 0, not of GPU 1"):
        LedgerReader(memory, GEOMETRY, 1, RUN)
    other = PoolGeometry(layers=2, kv_heads=8, head_dim=8, itemsize=2, finest_tp=4, block_bytes=128, blocks=20)
    with pytest.raises(ForeignLedgerError, match="has kv_heads 4, this pool has 8"):
        LedgerReader(memory, other, 0, RUN)
    ledger._memory.put("version", 2)
    with pytest.raises(ForeignLedgerError, match="has version 2, this process reads version 1"):
        LedgerReader(memory, GEOMETRY, 0, RUN)


def test_a_writer_that_died_in_a_change_is_reported() -> None:
    memory = buffer()
    ledger = BlockLedger(memory, GEOMETRY, 3, RUN)
    ledger._memory.put("sequence", 5)
    with pytest.raises(LedgerError, match=r"GPU 3 did not settle within 0\.05 s; its writer, process \d+, has died"):
        LedgerReader(memory, GEOMETRY, 3, RUN).snapshot(timeout_s=0.05)
    with pytest.raises(LedgerError, match="in the middle of a change"):
        ledger.check()


def _count_torn(memory: mmap.mmap, snapshots: int, results: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """Read snapshots; the writer keeps a pair of blocks in one state and stamps them alike."""
    reader = LedgerReader(memory, GEOMETRY, 0, RUN)
    torn, epochs = 0, set()
    for _ in range(snapshots):
        snapshot = reader.snapshot(timeout_s=20)
        torn += len(snapshot.ids(LEASED, 1)) not in (0, 19) or len(set(snapshot.stamp[1:].tolist())) != 1
        epochs.add(snapshot.epoch)
    results.put((torn, len(epochs)))


def test_snapshots_taken_while_another_process_writes_are_never_torn() -> None:
    memory = mmap.mmap(-1, ledger_bytes(GEOMETRY))
    ledger = BlockLedger(memory, GEOMETRY, 0, RUN)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_count_torn, args=(memory, 2000, results))
    child.start()
    epoch = 1
    while child.is_alive() and results.empty():
        blocks = ledger.take(19, 1, LEASED, epoch)
        ledger.move(blocks, 1, LEASED, FREE, epoch + 1)
        epoch += 2
    child.join(20)
    assert child.exitcode == 0
    torn, epochs = results.get()
    assert torn == 0
    assert epochs > 1, "the reader saw no change at all"
