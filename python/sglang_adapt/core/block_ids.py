"""Many KV block ids in a message, as bytes: a pool has tens of thousands, which as numbers would take milliseconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BlockIds = bytes
"""int32, little-endian, in order."""


def pack_ids(ids: npt.ArrayLike) -> BlockIds:
    """Block ids, `[n]`, as bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: BlockIds) -> npt.NDArray[np.int32]:
    """What was packed: int32 `[n]`, read-only.

    Raises:
        ValueError: not a whole number of ids.
    """
    return np.frombuffer(data, dtype="<i4")
