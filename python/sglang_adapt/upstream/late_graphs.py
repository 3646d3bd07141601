"""An engine that is started anew serves before its prefill graphs are captured; it captures them while it idles.

They are more than half of what a start takes once the weights are there: two passes and a capture for each of 58 sizes.
Until the graph of a size is there, prompts of that size are read without one, as stock reads prompts that are longer
than its largest graph. A size takes 0.1 to 0.3 s, for which a request may wait that comes meanwhile.

Decode graphs are captured before the engine serves, as stock does: without them each token would be late.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from sglang_adapt.upstream.awake import awake_while
from sglang_adapt.upstream.patch import Patch

logger = logging.getLogger(__name__)

_INPUTS = ("input_ids", "positions", "out_cache_loc")
"""Buffers from which a pass without requests reads its tokens, and where their KV goes."""

_late = False
_missing: MissingGraphs | None = None


class MissingGraphs:
    """Prefill graphs of a rank that are not captured yet.

    Args:
        runner: stock's PrefillCudaGraphRunner, which has captured none.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sizes: list[int] = sorted(runner.capture_num_tokens)
        self._count = len(self._sizes)
        self._since_s = monotonic()
        self._output: Any = None

    def __len__(self) -> int:
        return len(self._sizes)

    def has_graph_for(self, tokens: int) -> bool:
        """Whether the graph that a batch of so many tokens runs in is there; tokens: at most the largest size."""
        size = self._runner._pad_to_bucket(tokens, self._runner.capture_num_tokens)
        return size not in self._sizes

    def capture_one(self) -> None:
        """Capture the largest that is missing, as stock's order is: smaller ones find room in its memory.

        All ranks of an engine are to call it at the same iteration: they meet in it.

        Source: sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py, capture.
        """
        from sglang.srt.distributed.parallel_state import graph_capture

        runner, backend, size = self._runner, self._runner.backend, self._sizes[-1]
        for name in _INPUTS:
            # The passes before a capture write KV where the last prompt's went, unless told not to: to the slot that
            # nothing uses, as at the start.
            runner.buffer_registry.get_slot(name).buffer[:size].zero_()
        collects = gc.isenabled()
        gc.disable()
        try:
            with graph_capture() as context:
                runner.stream = context.stream
                with backend.capture_session(context.stream):
                    # One buffer has the output of all sizes; a session begins without one.
                    backend._shared_output_buffer = self._output
                    runner.capture_one_shape(size)
                    self._output = backend._shared_output_buffer
            runner.device_module.synchronize()
        finally:
            if collects:
                gc.enable()
        self._sizes.pop()
        if not self._sizes:
            logger.info("captured %d prefill graphs while idle, %.1f s since", self._count, monotonic() - self._since_s)


class CaptureLater(Patch):
    """Leaves the capture of prefill graphs to idle turns, in an engine that is started anew.

    Source: sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py, capture, whose warm-up of kernels is kept.
    """

    target = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., None], self: Any) -> None:
        global _missing
        from sglang.srt.model_executor.cuda_graph_config import Backend

        if not _late or self.prefill_backend_name != Backend.BREAKABLE:
            original(self)
            return
        self.warmup()
        _missing = MissingGraphs(self)
        logger.info("serves without prefill graphs first: %d are captured while it idles", len(_missing))


class NoGraphBeforeItsCapture(Patch):
    """Reads a prompt without a graph while the graph of its size is missing."""

    target = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
        can: bool = original(self, forward_batch)
        return can and (not _missing or _missing.has_graph_for(len(forward_batch.input_ids)))


class CaptureWhileIdle(Patch):
    """Captures a missing graph in a turn in which the engine has nothing to do, the same turn on all its ranks.

    Source: sglang/srt/managers/scheduler.py, on_idle.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.on_idle"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any) -> None:
        if _missing and self.is_fully_idle():
            _missing.capture_one()


LATE_GRAPH_PATCHES: tuple[type[Patch], ...] = (CaptureLater, NoGraphBeforeItsCapture, CaptureWhileIdle)


@awake_while
def graphs_are_missing() -> bool:
    """An idle engine goes on without sleeping until it has all graphs."""
    return bool(_missing)


def capture_prefill_graphs_late() -> None:
    """Before this process's model runner is built: its prefill graphs are captured while it idles."""
    global _late
    _late = True
