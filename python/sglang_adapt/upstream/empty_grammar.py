"""A grammar that leaves no token ends its request, not the engine.

`{"$ref": "#"}` is a JSON schema that no text fits; grammars can also run into such an end after some tokens. All
tokens are masked then, and what is drawn from is no distribution: stock's sampler raises on a CPU and asserts on a GPU,
which ends the engine and every request on it.
"""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import Patch

_ALL = -1
"""32 bits that are set: 32 tokens that may come."""


class SomeTokenMayCome(Patch):
    """Lifts a mask that has no token, so that some token is drawn; the grammar does not take it, and stock aborts."""

    target = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask"
    kind = "after"

    @staticmethod
    def hook(result: None, self: Any, vocab_mask: Any, idx: int) -> None:
        """Args: vocab_mask: int32 (batch, ceil(vocabulary / 32)) on the CPU, a bit for each token that may come."""
        row = vocab_mask[idx]
        if not row.any():
            row.fill_(_ALL)
