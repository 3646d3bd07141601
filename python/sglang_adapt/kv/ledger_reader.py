"""Reading the ledger of a GPU's blocks from any process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_adapt.kv.blocks import BlockState, ids_of
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.ledger_format import LedgerError, open_ledger
from sglang_adapt.kv.plan import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LedgerSnapshot:
    """One consistent view of a ledger; arrays as in LedgerMemory."""

    epoch: int
    state: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.uint16]
    copies: npt.NDArray[np.uint16]
    stamp: npt.NDArray[np.uint64]

    def ids(self, state: BlockState, engine: int | None = None) -> IntArray:
        """Blocks in a state, ascending; those of one engine if it is given."""
        return ids_of(self.state, self.owner, state, engine)

    def counts(self) -> dict[BlockState, int]:
        """Blocks in each state; they add up to the pool's blocks."""
        counted = np.bincount(self.state, minlength=len(BlockState))
        return {state: int(counted[state]) for state in BlockState}


class LedgerReader:
    """Read access to one GPU's ledger, from any process."""

    def __init__(self, buffer: Any, geometry: PoolGeometry, gpu: int, run_id: str) -> None:
        """Raises ForeignLedgerError or LedgerError: see `ledger_format.open_ledger`."""
        self.gpu = gpu
        self._memory = open_ledger(buffer, geometry, gpu, run_id)

    def snapshot(self, timeout_s: float = 1.0) -> LedgerSnapshot:
        """Copy the ledger between two changes of its writer.

        Raises:
            LedgerError: the writer was in a change for all of `timeout_s`, so it has died in one.
        """
        deadline = time.monotonic() + timeout_s
        memory = self._memory
        while True:
            before = memory.get("sequence")
            if before % 2 == 0:
                copy = LedgerSnapshot(
                    memory.get("epoch"),
                    memory.state.copy(),
                    memory.owner.copy(),
                    memory.copies.copy(),
                    memory.stamp.copy(),
                )
                if memory.get("sequence") == before:
                    return copy
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"the ledger of GPU {self.gpu} did not settle within {timeout_s:g} s; its writer, process "
                    f"{memory.get('writer_pid')}, has died in a change or is overloaded"
                )
            os.sched_yield()
