"""Where a server is, as people write it, and how long it can be connected to without a word."""

from __future__ import annotations

import argparse

KEEP_ALIVE_S = 2.0
"""How long our clients keep an idle connection. Stock's server closes one after 5 s, also as the next request is on its
way, which then ends with `Server disconnected`."""


def server_url(text: str) -> str:
    """The address of a server without what only ends it; the type of a flag. Raises argparse.ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not begin with http:// or https://; e.g. http://127.0.0.1:30000"
        )
    return text.rstrip("/")
