"""Calls about an engine's lease of KV blocks. Block ids go by rank: each rank has blocks of its own GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.upstream.control import finish_device_work
from sglang_adapt.upstream.kv_lease import EngineLease


def grow(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Add free blocks to the lease.

    Args:
        payload: `pages`: the blocks of each rank, packed (`core.block_ids`).

    Raises:
        LeaseError: a block that is leased already or cannot be.
    """
    EngineLease.of(scheduler).grow(unpack_ids(payload["pages"][rank]))
    return {}


def give_back(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Give free blocks up, evicting cached prefixes as needed; returns them as `pages`, packed.

    A batch in flight may still write to blocks whose request has just ended, so the device's work is waited for.

    Args:
        payload: `count`: how many on each rank.

    Raises:
        CannotShrinkError: requests hold too many; nothing has changed.
    """
    finish_device_work(scheduler)
    return {"pages": pack_ids(np.sort(EngineLease.of(scheduler).give_back(payload["count"])))}


def state(scheduler: Any, rank: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The lease as the rank's allocator and prefix cache have it.

    Returns:
        `pages`: the leased blocks; `free`: how many of them are free; `cached_tokens`: evictable prefixes.

    Raises:
        LeaseError: the allocator's free pages are not all in the lease.
    """
    lease = EngineLease.of(scheduler)
    lease.check()
    return {
        "pages": lease.pages.ids().tolist(),
        "free": lease.free_pages,
        "cached_tokens": int(lease.tree_cache.evictable_size()),
    }
