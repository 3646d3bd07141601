"""How long a request may become: the same answer in the router, which places it, and in every engine.

An engine of a wide TP size holds a longer request than a narrow one. So that what a request may become does not depend
on the engine that it meets first, each gets the smallest of the deployment's limits that has room for what it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 5
"""Stock refuses a prompt that is not shorter by more than this than the longest request (managers/tp_worker.py)."""
MOST = 1 << 30
"""What stock takes for a request that does not say how much it wants (managers/scheduler.py)."""


def limit_for(prompt: int, asked: int | None, limits: Sequence[int]) -> int:
    """The limit that a request gets, in tokens of prompt and output.

    Args:
        prompt: tokens of its prompt.
        asked: the most output tokens that it asks for; None: as many as there is room for.
        limits: the longest request of each TP size, ascending, at least one.

    Returns:
        The smallest that holds it; the largest if none does.
    """
    for limit in limits:
        if _least(prompt, asked or 0) <= limit:
            return limit
    return limits[-1]


def longest(prompt: int, asked: int | None, limits: Sequence[int]) -> int:
    """The tokens, prompt and output, that an engine has to hold for a request; arguments as `limit_for`."""
    limit = limit_for(prompt, asked, limits)
    return limit if asked is None else min(limit, _least(prompt, asked))


def fits(prompt: int, limit: int) -> bool:
    """Is a prompt accepted where the longest request has `limit` tokens?"""
    return _least(prompt, 0) <= limit


def _least(prompt: int, output: int) -> int:
    """The least limit that holds a request."""
    return prompt + max(output, MARGIN) + 1


def most_output(prompt: int, asked: int | None, limits: Sequence[int]) -> int:
    """Output tokens that a request may come to have; arguments as `limit_for`."""
    room = limit_for(prompt, asked, limits) - prompt - 1
    return max(0, min(MOST if asked is None else asked, room))
