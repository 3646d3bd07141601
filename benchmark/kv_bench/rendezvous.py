"""A kernel that waits for the same kernel on every other GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["target", "most_spins"])
def rendezvous_kernel(address, failed, target, most_spins):  # type: ignore[no-untyped-def]
    """Add one to the int32 at `address` and wait until it is `target`; note in `failed` if that does not
    happen."""
    counter = tl.load(address).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") + 1
    spins = 0
    while (seen < target) & (spins < most_spins):
        seen = tl.atomic_add(counter, 0, sem="acq_rel", scope="sys")
        spins += 1
    if seen < target:
        tl.store(failed, 1)
