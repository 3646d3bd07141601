"""Where a server is, as people write it."""

from __future__ import annotations

import argparse


def server_url(text: str) -> str:
    """The address of a server without what only ends it; the type of a flag. Raises argparse.ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not begin with http:// or https://; e.g. http://127.0.0.1:30000"
        )
    return text.rstrip("/")
