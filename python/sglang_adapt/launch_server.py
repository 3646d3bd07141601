"""`python -m sglang_adapt.launch_server`: start the server and leave nothing behind when it ends.

This process imports nothing heavy. It starts the forkserver, which loads sglang once; front, router, detokenizer
and all engine ranks are forked from it. It passes SIGTERM and Ctrl-C on, and when the front has ended, for
whatever reason, it ends every process that is left and removes the run's folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType

from sglang_adapt.core.process import adopt_orphans, end_descendants, keep_sockets_in, make_run_dir
from sglang_adapt.front.address import AddressError, hold_address, named_address
from sglang_adapt.front.entry import run_front
from sglang_adapt.front.flags import SettingsError, add_adapt_flags, split_argv
from sglang_adapt.upstream.environment import LIBRARY_FOLDERS, STOCK_ENVIRONMENT

EXIT_FAULT = 1
EXIT_USAGE = 2
_NOT_SEEN = 255
"""What multiprocessing says of a process whose forkserver has died."""
_KILL_WAIT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns its exit code (0 after SIGTERM or Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        _print_help()
        return 0
    try:
        ours, rest = split_argv(arguments)
        if (address := named_address(rest)) is not None:
            hold_address(*address).close()
    except (SettingsError, AddressError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    reloads = ours.adapt_slo_config is not None
    return _run(arguments, ours.adapt_start_method, reloads)


def _run(argv: list[str], start_method: str, reloads: bool) -> int:
    adopt_orphans()
    # Until there is a front to pass it on to; processes that are started meanwhile inherit this. So a terminal that is
    # closed reaches this process alone.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN) is signal.SIG_IGN
    try:
        run_dir = make_run_dir()
    except OSError as error:
        print(f"error: the run's folder for sockets cannot be made: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        os.environ.update(STOCK_ENVIRONMENT)
        for variable, name in LIBRARY_FOLDERS.items():
            os.environ.setdefault(variable, str(run_dir.path / name))
        keep_sockets_in(run_dir.path)
        context: ForkServerContext | SpawnContext
        if start_method == "forkserver":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["sglang_adapt.upstream.preload"])
        else:
            context = multiprocessing.get_context("spawn")
        print("sglang_adapt: loading sglang", file=sys.stderr, flush=True)
        front = context.Process(target=run_front, args=(argv, str(run_dir.path), start_method), name="front")
        stopping = _Stopping()
        _start_without_interrupts(front, start_method == "forkserver")
        stopping.pass_to(front.pid)
        if reloads:
            stopping.pass_reloads()
        elif not ignored:
            stopping.stop_at_hangup()
        front.join()
        code = front.exitcode or 0
        if stopping.asked and code in (0, -signal.SIGTERM, -signal.SIGKILL):
            return 0
        if code == _NOT_SEEN:
            # All are its children, so none is left to serve.
            print(
                "error: the forkserver ended, from which all processes come; all are ended", file=sys.stderr, flush=True
            )
            return EXIT_FAULT
        if code < 0:
            why = ""
            if code == -signal.SIGKILL:
                # Stock's front ends itself so when a process below it has crashed, and calls the router scheduler_0.
                why = " (a line above says so if another process crashed; scheduler_0 is the router; else see dmesg)"
            name = signal.Signals(-code).name
            print(f"error: the front ended with {name}{why}; all others are ended", file=sys.stderr, flush=True)
            return EXIT_FAULT
        return code
    except _StoppedEarly:
        return 0
    finally:
        if not end_descendants(_KILL_WAIT_S):
            print("error: a process of this server could not be ended", file=sys.stderr, flush=True)
        run_dir.remove()


def _start_without_interrupts(process: BaseProcess, from_forkserver: bool) -> None:
    """Start a process that Ctrl-C does not reach, nor anything that it starts, at no moment of its life.

    A terminal sends it to the whole foreground group, and processes that are still importing would end with a traceback
    before they could ignore it.
    """
    # The tracker's own start unblocks the signal, so it has to come first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if from_forkserver:
            forkserver.ensure_running()
        else:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if from_forkserver:
        # Takes as long as the forkserver loads sglang.
        process.start()


class _StoppedEarly(BaseException):
    """SIGTERM or Ctrl-C before there is a front; raised by the signal's handler, wherever the start is then."""


class _Stopping:
    """Passes the first SIGTERM or Ctrl-C on to the front as SIGTERM; a second one kills it.

    Before there is a front, the first one raises `_StoppedEarly`.
    """

    def __init__(self) -> None:
        self.asked = False
        self._pid: int | None = None
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_signal)

    def pass_to(self, pid: int | None) -> None:
        self._pid = pid

    def pass_reloads(self) -> None:
        """Pass SIGHUP on, upon which the front reads the tiers again."""
        signal.signal(signal.SIGHUP, lambda signum, frame: self._forward(signal.SIGHUP))

    def stop_at_hangup(self) -> None:
        """A terminal that is closed ends the server as SIGTERM does."""
        signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self._pid is None and not again:
            raise _StoppedEarly
        self._forward(signal.SIGKILL if again else signal.SIGTERM)

    def _forward(self, sig: signal.Signals) -> None:
        if self._pid is not None:
            try:
                os.kill(self._pid, sig)
            except ProcessLookupError:
                # It has ended already; join returns.
                return


def _print_help() -> None:
    from sglang_adapt.upstream.front import stock_parser

    parser = stock_parser(
        "python -m sglang_adapt.launch_server",
        "SGLang with a parallel layout that follows the traffic. Takes every flag of sglang's server and the "
        "group sglang_adapt at the end. Without --model-path it serves a small demo model.",
    )
    add_adapt_flags(parser)
    parser.print_help()


if __name__ == "__main__":
    sys.exit(main())
