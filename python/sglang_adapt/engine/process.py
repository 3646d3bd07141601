"""The entry point of one rank's process."""

from __future__ import annotations

from multiprocessing.connection import Connection

from sglang_adapt.engine.control import EngineControl
from sglang_adapt.upstream.rank import RankArgs, run_rank


def rank_main(args: RankArgs, report: Connection) -> None:
    """Run one rank until it is shut down; report its start, or why it failed to start.

    The report is a dict with `status`: stock's `get_init_info()` for "ready", `error` for "failed".
    """
    reported = False

    def send(info: dict[str, object]) -> None:
        nonlocal reported
        report.send(info)
        reported = True

    try:
        run_rank(args, send, EngineControl(page_copies=args.page_copies))
    except Exception as error:
        if not reported:
            report.send({"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
