"""What engines take of their GPUs' memory beyond weights and KV, seen as they start, for the next start's plan.

It is what a GPU has less free when an engine is warm than before it was started, less its KV and the weights of its
own. That holds only if nothing else of this server starts or ends on the GPU meanwhile; all other starts are let go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.core.layout import EngineSpec
from sglang_adapt.core.overheads import Overhead, OverheadKey, record_overhead

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineFacts:
    """What is known of the engines of one TP size.

    Attributes:
        shape, graph_batch: as in `core.overheads.OverheadKey`.
        weights_bytes: of weights that a rank loads for itself; 0 where they are shared.
        kv_bytes_per_token: of a rank's own KV pool; 0 where its KV lies in the pool of its GPU, which a keeper holds.
    """

    shape: str
    graph_batch: int
    weights_bytes: int
    kv_bytes_per_token: int


class StartObserver:
    """Watches the starts of engines.

    Args:
        free_bytes: what a GPU of the deployment has free now.
        gpu_name: name of the GPU model.
        facts: by TP size.
        record: called with each measured overhead.
    """

    def __init__(
        self,
        free_bytes: Callable[[int], int],
        gpu_name: str,
        facts: Mapping[int, EngineFacts],
        record: Callable[[Overhead], None],
    ) -> None:
        self._free_bytes = free_bytes
        self._gpu_name = gpu_name
        self._facts = facts
        self._record = record
        self._before: dict[EngineSpec, dict[int, int]] = {}
        self._starting: set[EngineSpec] = set()

    def starting(self, spec: EngineSpec) -> None:
        """To be called before an engine's processes are started."""
        alone = not self._disturb(spec)
        self._starting.add(spec)
        if alone:
            self._before[spec] = {gpu: self._free_bytes(gpu) for gpu in spec.gpus}

    def lost(self, spec: EngineSpec) -> None:
        """To be called when an engine has ended, starting or not."""
        self._starting.discard(spec)
        self._before.pop(spec, None)
        self._disturb(spec)

    def warm(self, spec: EngineSpec, kv_tokens: int) -> Overhead | None:
        """To be called when an engine is warm, with the tokens of its KV pool; returns what was measured, if it was."""
        self._starting.discard(spec)
        before = self._before.pop(spec, None)
        if before is None:
            return None
        facts = self._facts[spec.tp]
        known = facts.weights_bytes + kv_tokens * facts.kv_bytes_per_token
        taken = max(free - self._free_bytes(gpu) for gpu, free in before.items()) - known
        if taken <= 0:
            logger.warning("engine %s: %.2f GB beyond KV and weights cannot be; not recorded", spec, taken / 1e9)
            return None
        key = OverheadKey(self._gpu_name, facts.shape, spec.tp, facts.graph_batch)
        overhead = Overhead(key, taken, "free memory before an engine's start and when it was warm")
        logger.info("engine %s: takes %.2f GB a GPU beyond KV and weights", spec, taken / 1e9)
        self._record(overhead)
        return overhead

    def _disturb(self, spec: EngineSpec) -> bool:
        """Let go the measurements of all starts on an engine's GPUs; True if anything is starting there."""
        beside = [other for other in self._starting if other != spec and set(other.gpus) & set(spec.gpus)]
        for other in beside:
            self._before.pop(other, None)
        return bool(beside)


def start_waves(candidates: Sequence[EngineSpec], in_turn: bool) -> list[tuple[EngineSpec, ...]]:
    """The engines in groups that start one after the other: all at once, or a TP size at a time."""
    if not in_turn:
        return [tuple(candidates)]
    return [tuple(group) for _, group in groupby(sorted(candidates, key=lambda spec: spec.tp), lambda spec: spec.tp)]


def make_observer(config: AdaptConfig, server_args: Mapping[int, Any]) -> StartObserver | None:
    """The observer of a deployment; None on virtual GPUs, and for models whose sizes are not known.

    Raises:
        FreeMemoryError: the driver does not tell about the GPUs' memory.
    """
    from sglang_adapt.memory.free import gpu_memory
    from sglang_adapt.upstream.weights.sizes import decode_graph_batch, model_sizes

    if config.virtual:
        return None
    args = server_args[config.tp_sizes[-1]]
    sizes = model_sizes(args, config.tp_sizes)
    if isinstance(sizes, str):
        return None
    gpus = [gpu_memory(args.base_gpu_id + gpu * args.gpu_id_step) for gpu in range(config.gpus)]
    facts = {
        tp: EngineFacts(
            shape=sizes.shape,
            graph_batch=decode_graph_batch(server_args[tp]),
            weights_bytes=0 if config.share_weights else sizes.rank_bytes[tp],
            kv_bytes_per_token=0 if config.share_weights else sizes.kv_bytes_per_token[tp],
        )
        for tp in config.tp_sizes
    }

    def record(overhead: Overhead) -> None:
        try:
            record_overhead(Path(config.overheads_file), overhead)
        except (OSError, ValueError) as error:
            logger.warning("what was measured could not be kept in %s: %s", config.overheads_file, error)

    return StartObserver(lambda gpu: gpus[gpu].now().free_bytes, gpus[0].now().name, facts, record)
