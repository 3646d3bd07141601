"""What the command line says about sglang_adapt itself, as one frozen value that is passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_adapt.core.ablation import NOTHING_OFF, Ablation
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import EngineSpec, Layout, candidate_engines

WARMUP_PROMPT = (0, 1, 2, 3)
"""Token ids of the request that every engine must answer before it counts as ready."""
WARMUP_TOKENS = 2
"""Tokens that it generates."""
WARMUP = (len(WARMUP_PROMPT), WARMUP_TOKENS)
"""Its size, as `kv.sizing` takes it."""


class AdaptPolicy(StrEnum):
    """Who decides on the layout.

    AUTO: the planner, until an operator orders a layout, and again when it is given back.
    MANUAL: operators only.
    STATIC: nobody; it stays as at the start.
    """

    AUTO = "auto"
    MANUAL = "manual"
    STATIC = "static"


@dataclass(frozen=True)
class AdaptConfig:
    """The checked settings of one deployment.

    Attributes:
        gpus: GPUs (real or virtual) of the deployment.
        virtual: True if they are virtual GPUs on a CPU.
        tp_sizes: TP sizes whose engines are kept warm, ascending.
        layout: the layout at start.
        restart_limit: restarts of one engine within `restart_window_s` after which it is given up; as many of a
            keeper end the server.
        drain_timeout_s: how long running requests may take to finish after SIGTERM or Ctrl-C.
        switch_drain_timeout_s: how long a switch of layout waits for requests that have to end first.
        threads_per_rank: CPU threads of each rank's torch; used on virtual GPUs only.
        run_dir: private folder of this run's sockets, removed at the end.
        share_weights: keepers hold one copy of the weights for the engines of all TP sizes.
        start_method: multiprocessing's: `forkserver` or `spawn`.
        overheads_file: where measured overheads of engines are kept, see `core.overheads`.
        start_in_turn: engines of different TP sizes start one after the other, so that what they take of a GPU's
            memory can be measured.
        policy: who decides on the layout.
        interval_s: of the planner.
        gives_roles: the planner may give engines roles.
        sp_tokens: by TP size, tokens of a batch from which it runs sequence-parallel; a size that is not named runs
            all batches tensor-parallel.
        ablation: which mechanisms are switched off for a measurement.
        kv_copy: the way of KV from one GPU to another.
    """

    gpus: int
    virtual: bool
    tp_sizes: tuple[int, ...]
    layout: Layout
    restart_limit: int
    restart_window_s: float
    drain_timeout_s: float
    switch_drain_timeout_s: float
    threads_per_rank: int
    run_dir: str
    share_weights: bool
    start_method: str
    overheads_file: str
    start_in_turn: bool
    policy: AdaptPolicy = AdaptPolicy.MANUAL
    interval_s: float = 1.0
    gives_roles: bool = False
    sp_tokens: Mapping[int, int] = field(default_factory=dict)
    ablation: Ablation = NOTHING_OFF
    kv_copy: CopyPath = CopyPath.PEER

    @property
    def base_tp(self) -> int:
        """TP size whose shards of the weights sequence-parallel batches run on: the smallest; 1: on all of them."""
        return self.tp_sizes[0]

    @property
    def candidates(self) -> tuple[EngineSpec, ...]:
        """All engines that are kept warm."""
        return candidate_engines(self.tp_sizes, self.gpus)
