"""From the command line to checked settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_adapt.core.ablation import Ablation, AblationError, check_tier_engines, engines_text
from sglang_adapt.core.config import WARMUP, AdaptConfig, AdaptPolicy
from sglang_adapt.core.copy_path import AUTO, CopyPath, CopyPathError, choose_path, path_text
from sglang_adapt.core.layout import LayoutError, check_tp_sizes, default_tp_sizes, parse_layout, uniform_layout
from sglang_adapt.core.overheads import OverheadsFileError
from sglang_adapt.front.flags import (
    VIRTUAL_GPUS_DEFAULT,
    VIRTUAL_MAX_TOTAL_TOKENS,
    VIRTUAL_PAGE_TOKENS,
    SettingsError,
    ablation_of,
    split_argv,
    tp_sizes_named,
)
from sglang_adapt.front.memory import Deployment, plan_for, plans_for_fewer, read_all_overheads
from sglang_adapt.front.tiers import TiersError, make_tier_settings
from sglang_adapt.kv.geometry import GeometryError
from sglang_adapt.kv.sizing import DEFAULT_PAGE_TOKENS, KvShape, PoolSettings, pool_cost, size_pool
from sglang_adapt.memory.allocator import refuse_expandable_segments
from sglang_adapt.policy.memory_plan import MemoryPlan, plan_fault
from sglang_adapt.policy.sequence import sequence_lines
from sglang_adapt.policy.tiers import TierSettings

_VIRTUAL_MAX_RUNNING_REQUESTS = 64


@dataclass(frozen=True)
class Settings:
    """Everything the command line says.

    Attributes:
        config: sglang_adapt's own settings.
        server_args: stock ServerArgs by TP size.
        memory: what goes where in memory, or why that is not known before it is loaded.
        pool: the KV pool of every GPU; None with one TP size, whose engines have pools of their own, as stock.
        tiers: tiers, if there are any, and how fast the engines are.
        request_log: file of a line for each request with a tier; None for none.
        sequences: which batches run sequence-parallel, in words, a line for each TP size.
        kv_copy: how KV gets from GPU to GPU, in words; empty with one TP size or one GPU, where none does.
    """

    config: AdaptConfig
    server_args: dict[int, Any]
    memory: MemoryPlan | str
    pool: PoolSettings | None
    tiers: TierSettings
    request_log: Path | None = None
    sequences: tuple[str, ...] = ()
    kv_copy: str = ""


def make_settings(argv: Sequence[str], run_dir: str, start_method: str) -> Settings:
    """Parse and check a whole command line.

    Args:
        argv: the command line.
        run_dir: the run's private folder.
        start_method: how this process was started, and so how it starts others.

    Raises:
        SettingsError, LayoutError, StockSettingsError: with the reason and a way out.
    """
    from sglang_adapt.upstream import front as upstream
    from sglang_adapt.upstream.entry_points import has_cuda
    from sglang_adapt.upstream.limits import CLASS_FLAGS

    ours, rest = split_argv(argv)
    virtual = not has_cuda()
    if not virtual:
        check_allocator(os.environ)
    if not _names_model(rest):
        from sglang_adapt.demo import DEMO_NAME, demo_model_path

        # The last of a flag's values counts.
        rest = ["--model-path", str(demo_model_path()), "--served-model-name", DEMO_NAME, *rest]
    first = upstream.parse_server_args(rest)
    _refuse_unsupported(first)
    asked_page_size = upstream.asked_page_size(rest)
    _refuse_impossible(first, asked_page_size)
    gpus = _gpus(ours.adapt_virtual_gpus, virtual, first, upstream.gpu_count())
    heads, kv_heads = upstream.model_heads(first)
    tp_sizes = (
        default_tp_sizes(gpus, heads, kv_heads)
        if ours.adapt_tp_sizes is None
        else check_tp_sizes(tp_sizes_named(ours.adapt_tp_sizes), gpus, heads, kv_heads)
    )
    kv_copy, kv_copy_said = _copy_path(ours.adapt_kv_copy, first, gpus, tp_sizes, virtual)
    ablation = ablation_of(ours)
    _refuse_impossible_ablation(ablation, first, tp_sizes, kv_copy)
    layout_text = engines_text(ablation.tier_engines) or ours.adapt_layout
    layout = _layout(layout_text, first.tp_size, tp_sizes, gpus)
    if layout.roles and len(tp_sizes) < 2:
        raise SettingsError(
            f"--adapt-layout {layout}: engines with roles hand requests over through a KV pool that they share, which "
            f"there is with several TP sizes only; give more --adapt-tp-sizes than {tp_sizes[0]}, or no roles"
        )
    if ours.adapt_policy == AdaptPolicy.AUTO and len(tp_sizes) < 2:
        raise SettingsError(
            f"--adapt-policy auto needs engines of several TP sizes to choose from, there is only TP {tp_sizes[0]}; "
            "give more --adapt-tp-sizes, or --adapt-policy manual"
        )
    extra = ["--random-seed", str(first.random_seed)]
    if ours.adapt_slo_config is not None:
        _refuse_other_orders(first)
        extra += CLASS_FLAGS
    if not first.sleep_on_idle:
        # An engine that is not in the layout must not use a CPU core to look for work.
        extra.append("--sleep-on-idle")
    if virtual:
        if first.dtype == "auto":
            # A CPU computes half precision slowly, and outputs can be compared between TP sizes in float32 only.
            extra += ["--dtype", "float32"]
        if first.max_total_tokens is None:
            extra += ["--max-total-tokens", str(VIRTUAL_MAX_TOTAL_TOKENS)]
        if first.max_running_requests is None:
            extra += ["--max-running-requests", str(_VIRTUAL_MAX_RUNNING_REQUESTS)]
    server_args = {tp: upstream.parse_server_args([*rest, *extra, "--tp-size", str(tp)]) for tp in tp_sizes}
    finest = server_args[tp_sizes[-1]]
    pool = shape = context = None
    page_size = finest.page_size
    if len(tp_sizes) > 1:
        fault = upstream.sharing_fault(finest, tp_sizes)
        if fault is not None:
            raise SettingsError(fault)
        shape = _kv_shape(finest)
        page_size = asked_page_size or (VIRTUAL_PAGE_TOKENS if virtual else DEFAULT_PAGE_TOKENS)
        # A pool that cannot be, of whatever size, is refused before it is planned.
        context = upstream.context_tokens(finest)
        pool = _pool(shape, tp_sizes, page_size, finest.max_total_tokens, context)
    if ours.adapt_sp is not None and (fault := upstream.sequence_fault(finest, tp_sizes)) is not None:
        raise SettingsError(f"--adapt-sp {ours.adapt_sp}: {fault}")
    memory = _plan_memory(server_args, gpus, virtual, ours.adapt_overheads_file, shape, page_size, kv_copy)
    if shape is not None:
        if isinstance(memory, MemoryPlan):
            pool = _pool(shape, tp_sizes, page_size, memory.tokens, context)
        assert pool is not None
        server_args = {tp: _on_pool([*rest, *extra, "--tp-size", str(tp)], pool, tp) for tp in tp_sizes}
    try:
        tiers = make_tier_settings(
            ours.adapt_slo_config,
            ours.adapt_profile,
            server_args,
            gpus,
            virtual,
            plans=ours.adapt_policy == AdaptPolicy.AUTO,
            sp=ours.adapt_sp,
        )
        if ablation.tier_engines and tiers.config is not None:
            names = [tier.name for tier in tiers.config.tiers]
            check_tier_engines(ablation.tier_engines, names, [engine.name for engine in layout.engines])
    except (TiersError, AblationError) as error:
        raise SettingsError(str(error)) from None
    config = AdaptConfig(
        gpus=gpus,
        virtual=virtual,
        tp_sizes=tp_sizes,
        layout=layout,
        restart_limit=ours.adapt_restart_limit,
        restart_window_s=ours.adapt_restart_window,
        drain_timeout_s=ours.adapt_drain_timeout,
        switch_drain_timeout_s=ours.adapt_switch_timeout,
        threads_per_rank=1,
        run_dir=run_dir,
        share_weights=len(tp_sizes) > 1,
        start_method=start_method,
        overheads_file=str(ours.adapt_overheads_file),
        policy=AdaptPolicy(ours.adapt_policy),
        interval_s=ours.adapt_interval,
        gives_roles=ours.adapt_roles == "auto",
        sp_tokens=tiers.sp_tokens,
        ablation=ablation,
        kv_copy=kv_copy,
        start_in_turn=not virtual and len(tp_sizes) > 1 and isinstance(memory, MemoryPlan) and memory.has_assumed,
    )
    said = sequence_lines(ours.adapt_sp, tp_sizes, tiers.sp_tokens)
    return Settings(config, server_args, memory, pool, tiers, ours.adapt_request_log, tuple(said), kv_copy_said)


def _copy_path(asked: str, args: Any, gpus: int, tp_sizes: tuple[int, ...], virtual: bool) -> tuple[CopyPath, str]:
    """The way of KV from GPU to GPU, and the same in words.

    Raises:
        SettingsError: a way that these GPUs do not have, or one where no KV goes anywhere.
    """
    from sglang_adapt.memory.peers import PeerQuestionError, unreachable_pairs

    if len(tp_sizes) < 2 or gpus < 2:
        if asked != AUTO:
            raise SettingsError(
                f"--adapt-kv-copy {asked} is about KV that goes from GPU to GPU, and with {gpus} GPUs and TP "
                f"{','.join(map(str, tp_sizes))} none does; leave it out, or give more --adapt-tp-sizes"
            )
        return CopyPath.PEER, ""
    devices = [args.base_gpu_id + gpu * args.gpu_id_step for gpu in range(gpus)]
    try:
        unreachable = [] if virtual or asked == CopyPath.STAGED else unreachable_pairs(devices)
        path = choose_path(asked, unreachable)
    except (PeerQuestionError, CopyPathError) as error:
        raise SettingsError(str(error)) from None
    return path, path_text(path, asked, unreachable)


def _plan_memory(
    server_args: dict[int, Any],
    gpus: int,
    virtual: bool,
    overheads_file: Path,
    kv_shape: KvShape | None,
    page_size: int,
    kv_copy: CopyPath = CopyPath.PEER,
) -> MemoryPlan | str:
    """Plan the memory of a deployment; or why it cannot be planned, where that does no harm.

    Args:
        server_args: by TP size; what they say of pages does not count.
        kv_shape: for the KV pool of each GPU; None with one TP size, whose engines have pools of their own.
        page_size: tokens of a page at the smallest TP size.
        kv_copy: the way of KV from GPU to GPU.

    Raises:
        SettingsError: it does not fit, or the KV pool has to be sized and the sizes are not known.
    """
    from sglang_adapt.memory.free import FreeMemoryError, gpu_memory, host_memory
    from sglang_adapt.upstream.weights.sizes import decode_graph_batch, model_sizes

    tp_sizes = tuple(server_args)
    args = server_args[tp_sizes[-1]]
    sizes = model_sizes(args, tp_sizes)
    if isinstance(sizes, str):
        if args.max_total_tokens is None and len(tp_sizes) > 1:
            raise SettingsError(f"--max-total-tokens is not given, and the KV pool cannot be sized: {sizes}")
        return sizes
    try:
        deployment = Deployment(
            gpus=(host_memory(),)
            if virtual
            else tuple(gpu_memory(args.base_gpu_id + gpu * args.gpu_id_step).now() for gpu in range(gpus)),
            gpu_count=gpus,
            virtual=virtual,
            sizes=sizes,
            graph_batch={tp: decode_graph_batch(server_args[tp]) for tp in tp_sizes},
            overheads=read_all_overheads(overheads_file),
            share=args.mem_fraction_static,
            page=page_size,
            kv_shape=kv_shape,
            kv_copy=kv_copy,
        )
    except (FreeMemoryError, OverheadsFileError) as error:
        raise SettingsError(str(error)) from None
    plan = plan_for(deployment, tp_sizes, args.max_total_tokens)
    fault = plan_fault(plan, plans_for_fewer(deployment, tp_sizes))
    if fault is not None:
        raise SettingsError(fault)
    return plan


def _kv_shape(server_args: Any) -> KvShape:
    """The shapes of the model's KV, or why it cannot be pooled."""
    from sglang_adapt.upstream import front as upstream
    from sglang_adapt.upstream.kv_shape import UnpoolableError

    try:
        return upstream.pool_shape(server_args)
    except UnpoolableError as error:
        raise SettingsError(str(error)) from None


def _pool(
    shape: KvShape, tp_sizes: tuple[int, ...], page_size: int, tokens: int | None, context: int | None
) -> PoolSettings | None:
    """The KV pool of `tokens` tokens; None, and only the rest is checked, where the plan has to say how many."""
    try:
        if tokens is None:
            pool_cost(shape, tp_sizes, page_size, WARMUP)
            return None
        return size_pool(shape, tp_sizes, page_size, tokens, WARMUP, context)
    except GeometryError as error:
        raise SettingsError(str(error)) from None


def _on_pool(argv: list[str], pool: PoolSettings, tp: int) -> Any:
    """Stock ServerArgs of an engine of TP size `tp` on the pool; refuses a page size that stock would change."""
    from sglang_adapt.upstream import front as upstream
    from sglang_adapt.upstream.kv_pool import pool_server_args

    sizes = pool_server_args(pool.geometry, tp)
    # The last of a flag's values counts.
    args = upstream.parse_server_args(
        [*argv, "--page-size", str(sizes["page_size"]), "--max-total-tokens", str(sizes["max_total_tokens"])]
    )
    if args.page_size != sizes["page_size"]:
        raise SettingsError(
            f"pages hold {sizes['page_size']} tokens at TP {tp}, but stock's attention backend "
            f"{args.attention_backend} takes {args.page_size}: give a --page-size (tokens at the smallest TP size) of "
            "which it takes every multiple, another --attention-backend, or a single --adapt-tp-sizes value"
        )
    return args


def check_allocator(environment: Mapping[str, str]) -> None:
    """Refuse settings of torch's allocator that shared GPU memory does not survive.

    Raises:
        SettingsError: names the variable and what to remove from it.
    """
    try:
        refuse_expandable_segments(environment)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _names_model(argv: Sequence[str]) -> bool:
    """Does a stock command line say which model to serve, itself or in its config file?"""
    return any(arg.split("=")[0] in ("--model-path", "--model", "--config") for arg in argv)


def _gpus(asked: int | None, virtual: bool, server_args: Any, devices: int) -> int:
    if not virtual:
        if asked is not None:
            raise SettingsError("--adapt-virtual-gpus is for machines without CUDA; limit GPUs by CUDA_VISIBLE_DEVICES")
        usable = (devices - server_args.base_gpu_id + server_args.gpu_id_step - 1) // server_args.gpu_id_step
        if usable < 1:
            raise SettingsError(f"--base-gpu-id {server_args.base_gpu_id}: there are {devices} GPUs")
        return usable
    return VIRTUAL_GPUS_DEFAULT if asked is None else asked


def _layout(text: str | None, tp_size: int, tp_sizes: tuple[int, ...], gpus: int) -> Any:
    if text is not None:
        return parse_layout(text, tp_sizes, gpus)
    tp = tp_sizes[0] if tp_size == 1 else tp_size
    if tp not in tp_sizes:
        raise LayoutError(f"--tp-size {tp} is not among the TP sizes {', '.join(map(str, tp_sizes))}")
    return uniform_layout(tp, gpus)


def _refuse_impossible_ablation(ablation: Ablation, args: Any, tp_sizes: tuple[int, ...], kv_copy: CopyPath) -> None:
    """Refuse to switch off what a deployment does not have."""
    if ablation.page_copies and kv_copy is CopyPath.STAGED:
        raise SettingsError(
            "--adapt-ablate-page-copies is about GPUs that read each other's memory, and here KV is staged "
            "(--adapt-kv-copy); leave it out"
        )
    if len(tp_sizes) < 2:
        for flag in ("page_copies", "stop_copy", "reload_weights"):
            if getattr(ablation, flag):
                raise SettingsError(
                    f"--adapt-ablate-{flag.replace('_', '-')} is about requests that move, and with TP {tp_sizes[0]} "
                    "alone none do; give more --adapt-tp-sizes"
                )
    if ablation.reload_weights and args.load_format == "dummy":
        raise SettingsError(
            "--adapt-ablate-reload-weights reads the checkpoint again, and --load-format dummy has none; give a model "
            "with weights, or leave it out (ablation:6-warm of compare_goodput.py)"
        )


def _refuse_other_orders(args: Any) -> None:
    """Refuse what would order an engine's requests otherwise than tiers do."""
    reasons = (
        (args.enable_priority_scheduling, "--enable-priority-scheduling"),
        (args.schedule_low_priority_values_first, "--schedule-low-priority-values-first"),
        (args.disable_priority_preemption, "--disable-priority-preemption"),
        (args.abort_on_priority_when_disabled, "--abort-on-priority-when-disabled"),
        (args.schedule_policy != "fcfs", f"--schedule-policy {args.schedule_policy}"),
    )
    for refused, flag in reasons:
        if refused:
            raise SettingsError(
                f"{flag} cannot be used with --adapt-slo-config, by which tiers decide that; leave one off"
            )


def _refuse_impossible(args: Any, page_size: int | None) -> None:
    """Refuse sizes that stock takes, and that end an engine, mean the default, or make no plan."""
    counts = (("--page-size", page_size), ("--max-running-requests", args.max_running_requests))
    for flag, count in counts:
        if count is not None and count < 1:
            raise SettingsError(f"{flag} {count}: give 1 or more, or leave it out")
    share = args.mem_fraction_static
    if share is not None and not 0 < share <= 1:
        raise SettingsError(f"--mem-fraction-static {share}: give a share of the memory, above 0 and at most 1")


def _refuse_unsupported(args: Any) -> None:
    """Refuse stock modes that start other processes than ours or split the model otherwise."""
    for flag, key in (("--api-key", args.api_key), ("--admin-api-key", args.admin_api_key)):
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise SettingsError(
                f"{flag} is no key that a header can carry; give printable ASCII without blanks around it"
            )
    reasons = (
        (args.dp_size > 1, f"--dp-size {args.dp_size}", "replicas are engines of the layout: use --adapt-layout"),
        (args.pp_size > 1, f"--pp-size {args.pp_size}", "pipeline parallelism is not supported"),
        (args.nnodes > 1, f"--nnodes {args.nnodes}", "run one server a node behind sglang-router"),
        (args.enable_dp_attention, "--enable-dp-attention", "data-parallel attention is not supported"),
        (args.tokenizer_worker_num > 1, "--tokenizer-worker-num", "only one tokenizer worker is supported"),
        (args.detokenizer_worker_num > 1, "--detokenizer-worker-num", "only one detokenizer worker is supported"),
        (args.disaggregation_mode != "null", "--disaggregation-mode", "run stock sglang for it"),
        (args.encoder_only or args.language_only, "--encoder-only/--language-only", "run stock sglang for it"),
        (args.smg_grpc_mode or args.use_ray, "--smg-grpc-mode/--use-ray", "only the HTTP server is supported"),
        (args.enable_http2, "--enable-http2", "only uvicorn is supported"),
        (args.enable_memory_saver, "--enable-memory-saver", "the engines' memory must stay where it is"),
        (args.weight_cache_mode == "daemon", "--weight-cache-mode daemon", "leave it off"),
        (args.elastic_ep_backend is not None, "--elastic-ep-backend", "elastic expert parallelism is not supported"),
    )
    for refused, flag, way_out in reasons:
        if refused:
            raise SettingsError(f"{flag} cannot be used with sglang_adapt: {way_out}")
