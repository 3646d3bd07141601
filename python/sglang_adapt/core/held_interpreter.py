"""Ends a process whose Python interpreter is held by one call.

Such a call, as a search with a regular expression that backtracks without end, lets no other thread run, so neither
stock's watchdog nor anything else that is written in Python can end it. What does is the timer of `faulthandler`, whose
thread needs no interpreter: a thread that does need it sets the timer again and again.
"""

from __future__ import annotations

import faulthandler
import threading

_TURNS = 4
"""How often the timer is set again within its time."""


def end_if_held(timeout_s: float) -> threading.Event:
    """From now on, end this process with exit code 1 once no thread has had a turn for `timeout_s` seconds.

    The stacks of its threads go to stderr before. A process that is stopped (SIGSTOP) for so long ends as well.

    Args:
        timeout_s: above 0.

    Returns:
        What ends the watch when it is set.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            ended.wait(timeout_s / _TURNS)
        faulthandler.cancel_dump_traceback_later()

    threading.Thread(target=watch, name="held-interpreter", daemon=True).start()
    return ended
