"""A copy into blocks set aside for an engine: who gets which blocks, and the three ways in which it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from test_pools import ONE, OTHER, Node

from sglang_adapt.kv.plan import CopyBatch, IntArray, RequestCopy
from sglang_adapt.router.calls import CallBrokenError, CallRefusedError, EngineGoneError
from sglang_adapt.router.copying import by_rank, copy_into, share_out


def test_blocks_are_shared_out_in_order() -> None:
    reserved = np.array([[1, 2, 3], [7, 8, 9]], dtype=np.int32)
    shares = share_out(reserved, [2, 0, 1])
    assert [mine.tolist() for mine in shares] == [[[1, 2], [7, 8]], [[], []], [[3], [9]]]
    assert by_rank(shares, 2) == [[[1, 2], [], [3]], [[7, 8], [], [9]]]
    assert share_out(reserved[:, :0], []) == []
    assert by_rank([], 2) == [[], []]


def test_blocks_are_shared_out_to_the_last() -> None:
    with pytest.raises(AssertionError, match="3 blocks are reserved for requests that need 2"):
        share_out(np.array([[1, 2, 3]], dtype=np.int32), [2])


class Copy:
    """A copy from tp1@0 into two blocks that were reserved for tp1@1."""

    def __init__(self) -> None:
        self.node = Node(active=(ONE,))
        self.pools = self.node.pools
        self.lease = self.pools.first_lease(ONE)
        self.pools.first_lease(OTHER)
        self.reserved = self.pools.reserve(OTHER, 2)
        self.given_up = 0
        self.asked = 0

    def give_up(self) -> None:
        assert not self.open(), "blocks are given up while they are written"
        self.given_up += 1
        self.pools.cancel(OTHER, self.reserved)

    def open(self) -> bool:
        """Is a copy noted in a ledger?"""
        return any(ledger._memory.copies.any() for ledger in self.pools._ledgers.values())

    def states(self) -> dict[str, int]:
        return self.pools.states()[1]

    async def run(self, answer: Callable[[], Awaitable[str]], source: IntArray | None = None) -> str:
        async def ask() -> str:
            self.asked += 1
            assert self.open()
            return await answer()

        source = np.array([self.lease[0][:2]], dtype=np.int32) if source is None else source
        batches = [CopyBatch((0,), (1,), (RequestCopy("a", 20, source, self.reserved),))]
        return await copy_into(self.pools, OTHER, batches, ask, self.give_up)


async def fail(error: Exception) -> str:
    raise error


def test_the_engine_has_answered() -> None:
    async def story() -> None:
        copy = Copy()

        async def answer() -> str:
            return "done"

        assert await copy.run(answer) == "done"
        assert not copy.open()
        assert copy.given_up == 0
        assert copy.states()["reserved"] == 2

    asyncio.run(story())


def test_the_engine_has_refused() -> None:
    async def story() -> None:
        copy = Copy()
        with pytest.raises(CallRefusedError, match="no"):
            await copy.run(lambda: fail(CallRefusedError("no")))
        assert not copy.open()
        assert copy.given_up == 1
        assert copy.states()["reserved"] == 0
        copy.pools.check()

    asyncio.run(story())


@pytest.mark.parametrize("error", [EngineGoneError, CallBrokenError])
def test_the_engine_is_gone(error: type[Exception]) -> None:
    async def story() -> None:
        copy = Copy()
        running = asyncio.ensure_future(copy.run(lambda: fail(error("dead"))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not running.done()
        assert copy.open()
        copy.pools.engine_gone(OTHER)
        with pytest.raises(error, match="dead"):
            await running
        assert not copy.open()
        assert copy.given_up == 0
        assert copy.states()["reserved"] == 0
        copy.pools.check()

    asyncio.run(story())


def test_nobody_knows_whether_it_still_copies() -> None:
    async def story() -> None:
        copy = Copy()
        with pytest.raises(ZeroDivisionError):
            await copy.run(lambda: fail(ZeroDivisionError()))
        assert copy.open()
        assert copy.given_up == 0
        copy.pools.engine_gone(OTHER)
        assert not copy.open()
        assert copy.states()["reserved"] == 0
        copy.pools.check()

    asyncio.run(story())


def test_a_source_has_died_since() -> None:
    async def story() -> None:
        copy = Copy()
        copy.pools.engine_gone(ONE)
        with pytest.raises(CallRefusedError, match=r"tp1@1: .*"):
            await copy.run(lambda: fail(AssertionError("it was asked")))
        assert copy.asked == 0
        assert copy.given_up == 1
        assert copy.states()["reserved"] == 0

    asyncio.run(story())
