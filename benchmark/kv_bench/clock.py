"""Timing copies that must start on all GPUs at once.

On GPUs each repetition is queued behind a pause of about a millisecond and a rendezvous of all GPUs on the
device, so that neither launch latency nor a late process is in the time between the two events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from threading import Barrier
from typing import Any

import torch

from sglang_adapt.kv.lanes import Lane

_PAUSE_CYCLES = 2_000_000
_MOST_SPINS = 5_000_000


class Clock:
    """Times on the host: for CPUs."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier

    def measure(self, work: Callable[[], object], reps: int) -> float:
        """Median milliseconds of `work`, started together by all processes."""
        return self.wall(work, reps)

    def wall(self, work: Callable[[], object], reps: int) -> float:
        """Median milliseconds on the host, with the wait for the device."""
        times = []
        for _ in range(reps + 1):
            self._barrier.wait(60)
            begin = time.perf_counter()
            work()
            self.finish()
            times.append((time.perf_counter() - begin) * 1e3)
        return median(times[1:])

    def together(self) -> None:
        """Wait on the host for all processes."""
        self._barrier.wait(60)

    def finish(self) -> None:
        """Wait for the device."""

    def rendezvous(self) -> None:
        """Queue a point that no GPU passes before all have reached it."""
        self._barrier.wait(60)


class CudaClock(Clock):
    """Times on the device, in `lane`; `work` must queue into that lane or wait for it."""

    def __init__(self, barrier: Barrier, lane: Lane, counters: torch.Tensor, gpus: int) -> None:
        """`counters` is zeroed memory of one GPU that all of them map, one int32 for each section."""
        super().__init__(barrier)
        self._lane, self._counters, self._gpus = lane, counters, gpus
        self._round = 0
        self._failed = torch.zeros(1, dtype=torch.int32, device=lane.device)
        self._address = torch.zeros(1, dtype=torch.int64, device=lane.device)
        own = torch.zeros(1, dtype=torch.int32, device=lane.device)
        self._launch(torch.tensor([own.data_ptr()], dtype=torch.int64, device=lane.device), 1)  # compiles it
        self.section(0, barrier)

    def section(self, number: int, barrier: Barrier) -> None:
        """Start counting afresh, in step with the other processes even after a failed section."""
        self._barrier, self._round = barrier, 0
        self._failed.zero_()
        self._address.fill_(self._counters.data_ptr() + 4 * number)
        torch.cuda.synchronize()

    def measure(self, work: Callable[[], object], reps: int) -> float:
        pairs = []
        for _ in range(reps + 2):
            self._barrier.wait(60)
            with self._lane.use():
                torch.cuda._sleep(_PAUSE_CYCLES)
                self.rendezvous()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work()
                end.record()
            self.finish()
            pairs.append((begin, end))
        if int(self._failed):
            raise RuntimeError("a GPU did not come to the rendezvous")
        return median(begin.elapsed_time(end) for begin, end in pairs[2:])

    def finish(self) -> None:
        torch.cuda.synchronize()

    def rendezvous(self) -> None:
        self._round += 1
        self._launch(self._address, self._round * self._gpus)

    def _launch(self, address: torch.Tensor, target: int) -> None:
        from kv_bench.rendezvous import rendezvous_kernel

        kernel: Any = rendezvous_kernel[(1,)]
        kernel(address, self._failed, target, _MOST_SPINS)
