"""How KV gets from one GPU to another: which ways there are, and which one a deployment takes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class CopyPath(StrEnum):
    """A way.

    PEER: the GPU that needs the KV reads the memory of the one that has it.
    STAGED: the keeper of the GPU that has it sends it through two buffers in host memory, in turn.
    """

    PEER = "peer"
    STAGED = "staged"


AUTO = "auto"
"""What is asked for where the GPUs decide: PEER if each reaches each, else STAGED."""


class CopyPathError(ValueError):
    """A way that these GPUs do not have; the text says which of them, and what would do."""


def choose_path(asked: str, unreachable: Sequence[tuple[int, int]]) -> CopyPath:
    """The way for all copies of a deployment.

    Args:
        asked: AUTO, or the value of a CopyPath.
        unreachable: pairs of GPUs of which the first has no peer access to the second.

    Raises:
        CopyPathError: PEER is asked for, and there are such pairs.
        ValueError: something else is asked for.
    """
    if asked == AUTO:
        return CopyPath.STAGED if unreachable else CopyPath.PEER
    path = CopyPath(asked)
    if path is CopyPath.PEER and unreachable:
        raise CopyPathError(
            f"--adapt-kv-copy peer: {_no_access(unreachable)}; give staged, or auto, which takes it then"
        )
    return path


def path_text(path: CopyPath, asked: str, unreachable: Sequence[tuple[int, int]]) -> str:
    """The way in words, with the reason, for the log."""
    if path is CopyPath.PEER:
        return "peer: each GPU reads the memory of the others"
    why = _no_access(unreachable) if asked == AUTO else f"--adapt-kv-copy {asked}"
    return f"staged: through two buffers in host memory for each GPU, which is slower than peer access ({why})"


def _no_access(unreachable: Sequence[tuple[int, int]]) -> str:
    pairs = ", ".join(f"{reader}-{other}" for reader, other in unreachable)
    return f"no peer access between GPUs {pairs}"
