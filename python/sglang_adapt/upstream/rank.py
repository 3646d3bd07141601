"""One rank of one engine: a stock scheduler in a process forked from the forkserver.

Does what stock's `run_scheduler_process` (sglang/srt/managers/scheduler.py) does, with two differences: it
tells of a failure by raising instead of a signal to its parent, which is the forkserver and not the server; and
it checks the version gate and the patches first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_adapt.core.held_interpreter import end_if_held
from sglang_adapt.core.process import die_with_parent, ignore_stop_signals
from sglang_adapt.upstream.allocator_warmup import warm_up_allocator
from sglang_adapt.upstream.containment import ContainFailingMessages
from sglang_adapt.upstream.control import Control, use_control
from sglang_adapt.upstream.cuda_facts import give_back_cuda
from sglang_adapt.upstream.empty_grammar import SomeTokenMayCome
from sglang_adapt.upstream.handoff.patches import HANDOFF_PATCHES
from sglang_adapt.upstream.kv_pool import RankPool, current_pool, require_pool_used, use_rank_pool
from sglang_adapt.upstream.late_graphs import LATE_GRAPH_PATCHES, capture_prefill_graphs_late
from sglang_adapt.upstream.limits import LIMIT_PATCHES
from sglang_adapt.upstream.patch import PATCHES, LookForNoMethods, Patch, look_for_no_methods
from sglang_adapt.upstream.profiles import EngineInNamesOfProfiles, name_profiles
from sglang_adapt.upstream.rank_link import MessagesByRankLink
from sglang_adapt.upstream.shared_files import LoadSlots, UnlinkMessageQueue, WriteLoadsToSlot, use_load_slots
from sglang_adapt.upstream.token_ids_logprobs import NoNamedTokensIsATensorToo
from sglang_adapt.weights import WeightsHandle

_HELD = 0.2
"""Of `--watchdog-timeout`, how long one call may hold a rank's interpreter: nothing that an engine does takes seconds
without letting other threads run, whereas stock's watchdog waits for compilers as well."""
_MOST_HELD_S = 1e6


@dataclass(frozen=True)
class RankArgs:
    """What a rank needs to start; picklable.

    Attributes:
        engine: name of the engine, e.g. `tp2@0-1`.
        server_args: stock ServerArgs with the engine's `tp_size`.
        port_args: stock PortArgs of this start of the engine; the same for all its ranks.
        gpu_id: device index of the rank.
        tp_rank: rank within the engine.
        threads: CPU threads of torch, or None to leave torch's default.
        loads: where its load snapshots go.
        weights: the copy of the weights on its GPU, or None to load them as stock does.
        environment: the front's environment, which stock's launcher has filled in.
        pool: its GPU's KV pool, or None to allocate one as stock does.
        sp_tokens: tokens of a batch from which it runs sequence-parallel; None if none ever does.
        base_tp: TP size whose shards of the weights such a batch runs on; 1: on all of them.
        page_copies: KV arrives with a copy for each page and plane, for a measurement.
        late_graphs: it serves before its prefill graphs are captured.
    """

    engine: str
    server_args: Any
    port_args: Any
    gpu_id: int
    tp_rank: int
    threads: int | None
    loads: LoadSlots
    weights: WeightsHandle | None
    environment: dict[str, str]
    pool: RankPool | None = None
    sp_tokens: int | None = None
    base_tp: int = 1
    page_copies: bool = False
    late_graphs: bool = False


class OneOutputSocket(Patch):
    """Sends all of a scheduler's output through one socket.

    Stock has one to the tokenizer manager and one to the detokenizer, whose order a reader of both cannot know.
    Here both lead to the router, which needs an engine's messages in the order in which they were sent.
    """

    target = "sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels.create"
    kind = "after"

    @staticmethod
    def hook(channels: Any, *args: Any, **kwargs: Any) -> Any:
        import dataclasses

        unused = channels.send_to_tokenizer.socket
        if unused is not None:
            unused.close(linger=0)
        return dataclasses.replace(channels, send_to_tokenizer=channels.send_to_detokenizer)


class WatchdogEndsItsOwnProcess(Patch):
    """Makes a scheduler's watchdog end the hanging scheduler itself.

    Stock signals the parent, here the forkserver, which serves every other engine too. The router sees the
    rank die and restarts its engine.
    """

    target = "sglang.srt.utils.watchdog.WatchdogRaw.__init__"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
        import psutil

        self.parent_process = psutil.Process()


RANK_PATCHES: tuple[type[Patch], ...] = (
    OneOutputSocket,
    WatchdogEndsItsOwnProcess,
    WriteLoadsToSlot,
    UnlinkMessageQueue,
    ContainFailingMessages,
    EngineInNamesOfProfiles,
    MessagesByRankLink,
    *LATE_GRAPH_PATCHES,
    *LIMIT_PATCHES,
    SomeTokenMayCome,
    NoNamedTokensIsATensorToo,
)


def run_rank(args: RankArgs, report: Callable[[dict[str, Any]], None], control: Control) -> None:
    """Build the scheduler, report its start-up facts, serve until it is told to shut down.

    Args:
        args: what to start.
        report: called once with stock's `get_init_info()` dict when the scheduler is up.
        control: answers the router's calls.

    Raises:
        PoolMismatchError: stock's pool is not what the shared region has room for.
        PatchError, UnsupportedVersionError: this process is not what it should be.
        Exception: whatever the scheduler raises.
    """
    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.update(args.environment)
    label_metrics(args.server_args, args.engine)
    name_profiles(args.engine)
    give_back_cuda()
    prepare_process(*RANK_PATCHES)
    use_load_slots(args.loads)
    use_control(control)
    if args.late_graphs:
        capture_prefill_graphs_late()
    if args.pool is not None:
        PATCHES.apply(*HANDOFF_PATCHES)
    if args.weights is not None:
        from sglang_adapt.upstream.weights.attach import use_store

        use_store(args.weights, args.sp_tokens, args.base_tp)

    import setproctitle
    import torch
    from sglang.srt.entrypoints.engine import _compute_parallelism_ranks
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.runtime_context import publish

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    # Engines of other sizes use the same GPUs, so free memory differs between the GPUs of a group by design.
    envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.set(False)
    attn_cp_rank, moe_dp_rank, moe_ep_rank = _compute_parallelism_ranks(args.server_args, args.tp_rank)
    configure_scheduler_process(
        args.server_args, args.gpu_id, args.tp_rank, attn_cp_rank, moe_dp_rank, moe_ep_rank, 0, None
    )
    label = args.engine if args.server_args.tp_size == 1 else f"{args.engine}:{args.tp_rank}"
    configure_logging(args.server_args, label)
    # Stock finds its schedulers by the beginning of this title.
    setproctitle.setproctitle(f"sglang::scheduler_{label}")
    publish(args.server_args, role="scheduler")
    if args.pool is not None:
        if args.server_args.device == "cuda":
            # As stock does later: the region is mapped into the context of the rank's GPU.
            torch.cuda.set_device(args.gpu_id)
        use_rank_pool(args.engine, args.server_args.tp_size, args.pool)
    scheduler = Scheduler(
        args.server_args,
        args.port_args,
        args.gpu_id,
        args.tp_rank,
        moe_ep_rank,
        0,
        attn_cp_rank,
        moe_dp_rank,
        None,
    )
    if args.pool is not None:
        require_pool_used()
        warm_up_allocator(scheduler.token_to_kv_pool_allocator, scheduler.max_running_requests)
        control.started(scheduler, args.tp_rank, current_pool(), args.pool.gpus)
    if args.sp_tokens is not None:
        require_sequences(args.server_args, args.tp_rank)
    report(scheduler.get_init_info())
    end_if_held(held_timeout_s(args.server_args.watchdog_timeout))
    try:
        scheduler.run_event_loop()
    finally:
        if scheduler.gracefully_exit:
            scheduler.release_host_resources()


def held_timeout_s(watchdog_timeout_s: float) -> float:
    """How long one call may hold a rank's interpreter; stock's watchdog cannot run then."""
    return min(_MOST_HELD_S, max(1.0, _HELD * watchdog_timeout_s))


def require_sequences(server_args: Any, tp_rank: int) -> None:
    """Raise PatchError unless the model that was built can run batches sequence-parallel; count them from now on."""
    from sglang_adapt.upstream.patch import PatchError
    from sglang_adapt.upstream.sequence.counting import count_in_metrics
    from sglang_adapt.upstream.sequence.mode import current_mode

    mode = current_mode()
    if mode is None:
        raise PatchError("batches are to run sequence-parallel, but the model was not loaded from the shared weights")
    if server_args.enable_metrics and tp_rank == 0:
        count_in_metrics(mode, server_args.extra_metric_labels)


def label_metrics(server_args: Any, engine: str) -> None:
    """Give every metric of this process the label `engine`; without it engines overwrite each other's gauges."""
    labels = {**(server_args.extra_metric_labels or {}), "engine": engine}
    server_args.override("sglang_adapt", extra_metric_labels=labels)


def configure_logging(server_args: Any, label: str) -> None:
    """Log as stock does (level and format from server_args), with `label` after the time."""
    from sglang.srt.utils.common import configure_logger

    configure_logger(server_args, prefix=f" {label}")


def prepare_process(*patches: type[Patch]) -> list[str]:
    """Load stock's plugins, pass the version gate, apply patches and verify them together with the CPU's.

    Returns the names of the patches in place. To be called at the start of every process that uses sglang.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_adapt.upstream.entry_points import has_cuda
    from sglang_adapt.upstream.version import check_versions

    check_versions()
    keep_progress_bars_to_threads()
    patches = (LookForNoMethods, *patches)
    look_for_no_methods()
    load_plugins()
    expected = patches
    if not has_cuda():
        from sglang_adapt.upstream.cpu.patches import CPU_PATCHES

        assert_virtual_gpus()
        expected = CPU_PATCHES + patches
    PATCHES.apply(*patches)
    return PATCHES.verify(*expected)


def keep_progress_bars_to_threads() -> None:
    """Let tqdm, which shows how far weights are loaded, lock its bars among the threads of this process alone.

    Its own lock is for other processes as well: a named semaphore, which stays in /dev/shm when the process is killed.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def assert_virtual_gpus() -> None:
    """Raise unless sglang runs on our CPU platform in this process (its loading fails open as well)."""
    from sglang.srt.platforms import current_platform

    from sglang_adapt.upstream.cpu.platform import VirtualGpuPlatform
    from sglang_adapt.upstream.patch import PatchError

    if not isinstance(current_platform, VirtualGpuPlatform):
        raise PatchError(
            f"there is no CUDA device, and sglang runs on {type(current_platform).__name__} instead of "
            f"sglang_adapt's VirtualGpuPlatform; install the package (pip install, uv sync), so that sglang "
            f"finds its entry points"
        )
