"""What a rank's process needs, before its scheduler is built, so that its requests can move to other engines."""

from __future__ import annotations

from sglang_adapt.upstream.awake import StaysAwake
from sglang_adapt.upstream.handoff.bookkeeping import BOOKKEEPING_PATCHES
from sglang_adapt.upstream.handoff.iteration import ITERATION_PATCHES
from sglang_adapt.upstream.handoff.reading import READING_PATCHES
from sglang_adapt.upstream.handoff.soon import SOON_PATCHES
from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.penalties import PENALTY_PATCHES
from sglang_adapt.upstream.seeds import SEED_PATCHES

HANDOFF_PATCHES: tuple[type[Patch], ...] = (
    StaysAwake,
    *BOOKKEEPING_PATCHES,
    *ITERATION_PATCHES,
    *READING_PATCHES,
    *SOON_PATCHES,
    *PENALTY_PATCHES,
    *SEED_PATCHES,
)
"""Requests on the move are not lost to stock's bookkeeping, what they sample does not depend on their engine, who has
them looks for messages between batches, and who gets them is awake."""
