"""A process with nothing but a CUDA context: what that takes, and how a GPU itself starts after idling."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

_SIZE = 4096
_LAUNCHES = 20


def _serve(pipe: Connection, gpu: int) -> None:
    import torch

    device = torch.device("cuda", gpu)
    matrix = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16)

    def work() -> float:
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            matrix @ matrix
        torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - began)

    work()
    pipe.send(None)
    while True:
        try:
            idle_s = pipe.recv()
        except EOFError:
            return
        for _ in range(10):
            work()
        time.sleep(idle_s)
        pipe.send([work() for _ in range(10)])


class Probe:
    """A context on one GPU, with cuBLAS loaded."""

    def __init__(self, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, gpu), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def after_idling(self, seconds: float) -> list[float]:
        """Milliseconds of a fixed piece of work, ten times, after `seconds` without any."""
        self._pipe.send(seconds)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()
