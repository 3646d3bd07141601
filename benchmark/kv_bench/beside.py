"""A copy beside running work: how much it slows matrix products of a decode step, and how fast it then is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

_ROWS, _IN, _OUT = 64, 4096, 14336  # the up projection of Llama-3.1-8B for a batch of 64
_PRODUCTS, _BATCHES = 10, 60


class DecodeLoad:
    """Matrix products on a stream of their own, in batches with an event after each."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._x = torch.randn(_ROWS, _IN, dtype=torch.bfloat16, device=device)
        self._w = torch.randn(_IN, _OUT, dtype=torch.bfloat16, device=device)

    def start(self) -> list[torch.cuda.Event]:
        """Queue all batches; returns their events, the first before any work."""
        events = []
        with torch.cuda.stream(self._stream):
            for _ in range(_BATCHES):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append(event)
                for _ in range(_PRODUCTS):
                    torch.mm(self._x, self._w)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
        return events

    def alone_ms(self) -> float:
        """Median milliseconds of a batch with nothing beside it."""
        torch.cuda.synchronize()
        events = self.start()
        torch.cuda.synchronize()
        return _batch_ms(events)


def slowdown(load: DecodeLoad, copy: Callable[[], None], alone_ms: float) -> tuple[float, float]:
    """Run `copy` (which returns when it has ended) again and again beside the load.

    Returns:
        how many times longer the median batch took than alone, and the copy's median milliseconds. Copies that
        were still running when the load had ended are left out.
    """
    copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    stop = threading.Event()
    device = torch.cuda.current_device()

    def loop() -> None:
        torch.cuda.set_device(device)
        while not stop.is_set():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            copy()
            end.record()
            end.synchronize()
            copies.append((begin, end))

    thread = threading.Thread(target=loop)
    thread.start()
    beside = load.start()
    beside[-1].synchronize()
    stop.set()
    thread.join()
    torch.cuda.synchronize()
    last = beside[-1]
    whole = [pair for pair in copies if pair[1].elapsed_time(last) > 0 and beside[0].elapsed_time(pair[0]) > 0]
    if not whole:
        raise RuntimeError("no copy fitted into the load; make the load longer")
    return _batch_ms(beside) / alone_ms, median(begin.elapsed_time(end) for begin, end in whole)


def _batch_ms(events: list[torch.cuda.Event]) -> float:
    return median(a.elapsed_time(b) for a, b in pairwise(events))
