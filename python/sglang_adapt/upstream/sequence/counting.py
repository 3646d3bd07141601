"""Batches that no Python of the model runs for, and the metric of how many ran each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.sequence.mode import SEQUENCE, TENSOR, SequenceMode, current_mode, kind_of


class CountGraphReplays(Patch):
    """Counts batches that run in CUDA graphs by the mode in which their graph was captured.

    A replay does not call the model's forward, where all other batches are counted.
    """

    target = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    kind = "after"

    @staticmethod
    def hook(result: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = current_mode()
        if mode is not None and result.can_run_graph:
            ids = forward_batch.input_ids
            mode.count_replay(kind_of(forward_batch), len(ids) if ids is not None else forward_batch.batch_size)


def count_in_metrics(mode: SequenceMode, labels: Mapping[str, str]) -> None:
    """Let a mode's batches be seen as `sglang_adapt:engine_batches_total{engine,mode,kind}`.

    Args:
        mode: of rank 0; the other ranks run the same batches.
        labels: of every metric of this process, by name; the engine's name is among them.
    """
    # Here, because it looks for its folder in the environment when it is imported.
    from prometheus_client import Counter

    counter = Counter(
        "sglang_adapt:engine_batches",
        "Batches of an engine that can run them tensor-parallel (tp) or sequence-parallel (sp).",
        (*labels, "mode", "kind"),
    )
    # A series that is there from the start shows its first increase.
    series = {
        (name, kind): counter.labels(**labels, mode=name, kind=kind)
        for name in (SEQUENCE, TENSOR)
        for kind in ("prefill", "decode")
    }
    mode.counted = lambda name, kind: series[name, kind].inc()
