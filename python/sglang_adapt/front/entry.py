"""The way into the front's process: the process that starts it imports this, and not the front with all it needs."""

from __future__ import annotations

from collections.abc import Sequence


def run_front(argv: Sequence[str], run_dir: str, start_method: str) -> None:
    """`front.process.front_main`, imported where it runs."""
    from sglang_adapt.front.process import front_main

    front_main(argv, run_dir, start_method)
