"""The front's process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setproctitle

from sglang_adapt.core.ablation import NOTHING_OFF
from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import LayoutError
from sglang_adapt.core.messages import RequestReport, RouterStatus
from sglang_adapt.core.process import die_with_parent, process_context
from sglang_adapt.core.slo import Terms
from sglang_adapt.front.accounting import Accounting
from sglang_adapt.front.address import AddressError, hold_address
from sglang_adapt.front.asgi import AdaptLayer
from sglang_adapt.front.early import EarlyRefusals
from sglang_adapt.front.flags import SettingsError
from sglang_adapt.front.gate import Gate
from sglang_adapt.front.launcher import EngineStartError, RouterLauncher
from sglang_adapt.front.layout_api import LayoutApi
from sglang_adapt.front.link import RouterLink
from sglang_adapt.front.live import EVENTS_PATH, Live, watching
from sglang_adapt.front.recent import Recent
from sglang_adapt.front.refusal_log import RefusalLog
from sglang_adapt.front.settings import Settings, make_settings
from sglang_adapt.front.slo_api import SloApi
from sglang_adapt.policy.lengths import MARGIN
from sglang_adapt.policy.memory_plan import MemoryPlan, plan_lines

logger = logging.getLogger(__name__)

EXIT_USAGE = 2
EXIT_START_FAILED = 3
_LISTEN_TIMEOUT_S = 60.0


def front_main(argv: Sequence[str], run_dir: str, start_method: str) -> None:
    """Serve until told to stop. Exits with `EXIT_USAGE` on bad settings, `EXIT_START_FAILED` if an engine fails."""
    code = 1
    try:
        _serve(argv, run_dir, start_method)
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        logger.exception("the front has failed")
    # Without waiting for the detokenizer and the router, as Python would: the first process ends them.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _serve(argv: Sequence[str], run_dir: str, start_method: str) -> None:
    die_with_parent(signal.SIGKILL)
    context = process_context(start_method)
    # Until the HTTP server runs there is nothing to drain; the launcher's process forwards Ctrl-C as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Stock puts its sockets where temporary files go; in the run's folder they are private and go with it.
    tempfile.tempdir = run_dir

    from sglang_adapt.upstream import front as upstream
    from sglang_adapt.upstream.client_priority import ignore_priorities
    from sglang_adapt.upstream.command_line import StockSettingsError
    from sglang_adapt.upstream.rank import prepare_process
    from sglang_adapt.upstream.shared_files import LoadSlots, use_load_slots

    setproctitle.setproctitle("sglang_adapt::front")
    prepare_process(*upstream.FRONT_PATCHES)
    try:
        settings = make_settings(argv, run_dir, start_method)
        http = settings.server_args[settings.config.tp_sizes[0]]
        held = hold_address(http.host, http.port)
    except (SettingsError, LayoutError, AddressError, StockSettingsError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    config = settings.config
    kind = "virtual GPUs" if config.virtual else "GPUs"
    logger.info(
        "sglang_adapt: %d %s, layout %s, warm engines %s",
        config.gpus,
        kind,
        config.layout,
        ", ".join(map(str, config.candidates)),
    )
    if config.ablation != NOTHING_OFF:
        logger.warning("switched off for a measurement: %s", config.ablation)
    if settings.kv_copy:
        say = logger.warning if config.kv_copy is CopyPath.STAGED else logger.info
        say("KV between GPUs: %s", settings.kv_copy)
    for line in settings.sequences:
        logger.info("sequence parallelism: %s", line)
    if isinstance(settings.memory, MemoryPlan):
        for line in plan_lines(settings.memory):
            logger.info("memory: %s", line)
    else:
        logger.info("memory: not planned: %s", settings.memory)
    control = f"ipc://{Path(run_dir) / 'control'}"
    use_load_slots(LoadSlots(run_dir, len(config.candidates), slot=None))
    launcher = RouterLauncher(context, config, settings.server_args, control, settings.pool, settings.tiers)
    accounting = _accounting(settings)
    recent = Recent()

    def ended(report: RequestReport) -> None:
        accounting.ended(report)
        recent.ended(report)

    link = RouterLink(control, ended, _tell_limits)
    args = settings.server_args[config.tp_sizes[0]]
    tiers = settings.tiers
    refusals = RefusalLog()

    def refused(terms: Terms) -> None:
        accounting.refused(terms)
        recent.refused(terms)
        refusals.refused(terms.tier)

    gate = None if tiers.config is None else Gate(tiers, link, refused)
    early = None if gate is None else EarlyRefusals(gate, counts=args.enable_metrics)
    slo = SloApi(tiers, gate, link.set_tiers, has_key=bool(args.api_key or args.admin_api_key))

    def tier_names() -> list[str]:
        return [] if gate is None else [tier.name for tier in gate.config.tiers]

    def page_data() -> dict[str, Any]:
        return {
            # A folder is nobody's business.
            "model": args.served_model_name.rstrip("/").rsplit("/", 1)[-1],
            "needs_key": bool(args.api_key or args.admin_api_key),
            "tiers": None if gate is None else recent.told(gate.config.tiers),
        }

    live = Live(link.view, page_data)
    stopped = threading.Event()
    if tiers.config is not None:
        ignore_priorities()
        # Until there is a handler.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        logger.info("tiers (%s): %s", tiers.source, ", ".join(tier.name for tier in tiers.config.tiers))
        logger.info("speed: %s", tiers.speed_source)
    try:
        upstream.serve(
            args,
            launcher,
            AdaptLayer,
            {
                "link": link,
                "drain_timeout_s": config.drain_timeout_s,
                "router": lambda: launcher.process,
                "start_receiving": upstream.start_receiving,
                "gate": gate,
                "early": early,
                "started": accounting.begin,
                "stopping": live.close,
                "stopped": stopped.set,
                "reload": None if gate is None else slo.reload,
            },
            lambda args: _warm_up(args, stopped),
            LayoutApi(link, bool(args.api_key or args.admin_api_key), tier_names).routes | slo.routes,
            {EVENTS_PATH: watching(live)},
            early,
        )
    except EngineStartError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_START_FAILED)
    except StockSettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    finally:
        held.close()


def _tell_limits(status: RouterStatus) -> None:
    """Let stock's `/server_info` follow what the layout, or what can be bound, holds."""
    from sglang_adapt.upstream import front as upstream

    if status.request_tokens:
        upstream.tell_longest_prompt(status.request_tokens - MARGIN)


def _accounting(settings: Settings) -> Accounting:
    """Where it is noted how requests have fared. Exits with `EXIT_USAGE` if the request log cannot be written."""
    path = settings.request_log
    with_metrics = any(args.enable_metrics for args in settings.server_args.values())
    try:
        log = None if path is None else path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        print(f"error: --adapt-request-log {path} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    config = settings.tiers.config
    return Accounting(log, with_metrics, () if config is None else [tier.name for tier in config.tiers])


def _warm_up(server_args: Any, stopped: threading.Event) -> None:
    """Wait until the HTTP server listens and the router's status is in, then send one request through everything.

    Raises:
        TimeoutError: it does not listen, or hears nothing of the router, in a minute.
        ConnectionError: it has stopped, or could not listen; it has said why.
        OSError: the request fails.
    """
    url = server_args.url()
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        try:
            _get(server_args, f"{url}/ready")
            ready = True
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not ready after {_LISTEN_TIMEOUT_S:.0f} s: {error}") from error
            ready = False
        # Somebody else may have answered.
        if stopped.wait(0 if ready else 0.05):
            raise ConnectionError(f"{url} has stopped before it was ready, or cannot be listened on")
        if ready:
            break
    _get(server_args, f"{url}/model_info")
    logger.info("ready: http://%s:%d, process %d", server_args.host, server_args.port, _first_process())


def _first_process() -> int:
    """The process that signals are for: it passes them on, and outlives this one to remove what is left."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    return parent.pid


def _get(server_args: Any, url: str) -> bytes:
    request = urllib.request.Request(url)
    if server_args.api_key:
        request.add_header("Authorization", f"Bearer {server_args.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error}") from error
