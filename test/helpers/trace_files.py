"""Traces as files, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_trace(path: Path, rows: Iterable[tuple[float, int, int]]) -> Path:
    """A trace of (arrival in ms, prompt tokens, output tokens); returns its path."""
    lines = (",".join(map(str, row)) for row in rows)
    path.write_text("\n".join(["arrival_ms,input_tokens,output_tokens", *lines]) + "\n")
    return path
