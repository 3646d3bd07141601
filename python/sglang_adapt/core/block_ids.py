"""Many KV block ids in a message: a bit for each block of the pool up to the highest one.

A pool has tens of thousands, most of which a switch names. As numbers, even packed, they would take a router and an
engine milliseconds of its pause.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BlockIds = bytes
"""Bit `i % 8` of byte `i // 8` says whether block `i` is meant."""


def pack_ids(ids: npt.ArrayLike) -> BlockIds:
    """Block ids, `[n]`, ascending, as bytes.

    Raises:
        ValueError: they are not ascending, or one is negative.
    """
    blocks = np.asarray(ids, dtype=np.int32)
    if not len(blocks):
        return b""
    if blocks[0] < 0 or not ascending(blocks):
        raise ValueError(f"block ids from {blocks[0]} to {blocks[-1]} are to be packed, which are not ascending")
    bits = np.zeros(int(blocks[-1]) + 1, dtype=bool)
    bits[blocks] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_ids(data: BlockIds) -> npt.NDArray[np.int32]:
    """What was packed: int32 `[n]`, ascending."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits.view(bool)).astype(np.int32)


def named_twice(ids: npt.NDArray[np.int32]) -> int | None:
    """One of these ids, `[n]`, not negative, that is there more than once; None if there is none."""
    if ascending(ids):
        return None
    times = np.bincount(ids)
    return int(times.argmax()) if times.max() > 1 else None


def ascending(ids: npt.NDArray[np.int32]) -> bool:
    """Is each of these ids, `[n]`, higher than the one before? So none is there twice."""
    return bool((ids[1:] > ids[:-1]).all())
