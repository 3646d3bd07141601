"""With tiers, `priority` of a request does not count: neither for its order nor as a label of stock's metrics."""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import PATCHES, Patch


class TiersInsteadOfPriority(Patch):
    """Gives every request the priority of those that name none, before stock counts or sends it.

    Stock's priorities are on, because tiers are made of them (`limits.CLASS_FLAGS`), and stock takes a client's number
    for a label of its metrics, with a set of series for each that clients think of. The router writes the class of a
    request that has a tier into its message; an embedding has none, and would order itself.
    """

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._set_default_priority"
    kind = "replace"

    @staticmethod
    def hook(self: Any, obj: Any) -> None:
        obj.priority = self.default_priority_value


def ignore_priorities() -> None:
    """Apply the patch in this process, a front with tiers. Raises PatchError."""
    PATCHES.apply(TiersInsteadOfPriority)
    PATCHES.verify(TiersInsteadOfPriority)
