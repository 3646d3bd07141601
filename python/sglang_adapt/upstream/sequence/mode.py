"""Which way the batch runs that is computed now, and how many have run each way.

The choice depends on what all ranks know alike, the batch and the threshold, so that no word is needed between them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sglang_adapt.upstream.sequence.base import Base
from sglang_adapt.upstream.sequence.exchange import Exchange, TokenSlices
from sglang_adapt.upstream.sequence.group import Groups

logger = logging.getLogger(__name__)

SEQUENCE, TENSOR = "sp", "tp"
"""How a batch runs, as metrics and answers name it."""


class SequenceModeError(ValueError):
    """A threshold that cannot be set now; nothing has changed."""


class SequenceMode:
    """The mode of one rank's model.

    Args:
        base: this rank's part of a batch that runs sequence-parallel.
        groups: of it.
        threshold: tokens of a batch from which it runs sequence-parallel; 0 and 1: each batch; None: no batch.

    Attributes:
        exchange: of the batch that runs sequence-parallel now; None while one runs tensor-parallel, or none at all.
        batches: by (mode, kind), how many; kinds are `prefill` and `decode`.
        unable: by reason, batches that were large enough and ran tensor-parallel all the same.
        counted: told of each batch: its mode and kind.
    """

    def __init__(self, base: Base, groups: Groups, threshold: int | None) -> None:
        self.base = base
        self._groups = groups
        self._threshold = threshold
        self.exchange: Exchange | None = None
        self.batches: Counter[tuple[str, str]] = Counter()
        self.unable: Counter[str] = Counter()
        self.counted: Callable[[str, str], None] = lambda mode, kind: None
        self._graphs: dict[str, dict[int, str]] = {"prefill": {}, "decode": {}}
        self._sliced: tuple[torch.Tensor, Exchange] | None = None

    @property
    def threshold(self) -> int | None:
        return self._threshold

    def set_threshold(self, tokens: int | None) -> None:
        """From the next batch on. All ranks have to be told between the same two batches.

        Raises:
            SequenceModeError: negative, or the mode is part of CUDA graphs already.
        """
        if tokens is not None and tokens < 0:
            raise SequenceModeError(f"a threshold of {tokens} tokens is negative; give 0 or more, or null for never")
        if any(self._graphs.values()):
            raise SequenceModeError(
                "this engine's CUDA graphs were captured for the threshold that it started with; start the server "
                "with another --adapt-sp"
            )
        self._threshold = tokens

    def wants(self, tokens: int) -> bool:
        """Is a batch of so many tokens large enough?"""
        return self._threshold is not None and tokens >= self._threshold

    def choose(self, tokens: int, batch: Any, has_embeds: bool) -> Exchange | None:
        """How a batch is to run: with this exchange, or tensor-parallel (None).

        Args:
            tokens: of the batch, with the padding of a CUDA graph that is captured.
            batch: stock's ForwardBatch.
            has_embeds: it brings embeddings in place of token ids.
        """
        if tokens < 1 or not self.wants(tokens):
            return None
        reason = unable_reason(batch, has_embeds)
        if reason is not None:
            if not self.unable[reason]:
                logger.warning(
                    "a batch of %d tokens is large enough to run sequence-parallel, but cannot: %s. It and others of "
                    "its kind run tensor-parallel",
                    tokens,
                    reason,
                )
            self.unable[reason] += 1
            return None
        slices = TokenSlices(tokens, self.base.slice, self.base.sp)
        return Exchange(slices, self._groups.tokens, self._groups.sums)

    def count(self, mode: str, kind: str) -> None:
        self.batches[mode, kind] += 1
        self.counted(mode, kind)

    def captured(self, mode: str, kind: str, tokens: int) -> None:
        """A CUDA graph for batches of up to `tokens` tokens is captured in this mode, which its replays have."""
        self._graphs[kind][tokens] = mode

    def count_replay(self, kind: str, tokens: int) -> None:
        """A batch of `tokens` tokens has run in the smallest graph that holds it."""
        graphs = self._graphs[kind]
        holding = min((size for size in graphs if size >= tokens), default=None)
        if holding is not None:
            self.count(graphs[holding], kind)

    def keep_sliced(self, hidden: torch.Tensor, exchange: Exchange) -> None:
        """This rank's rows of a batch's hidden states are on their way to the logits, by way of the model's forward."""
        self._sliced = (hidden, exchange)

    def take_sliced(self, hidden: torch.Tensor) -> Exchange | None:
        """The exchange that makes hidden states whole, if they are the ones that were kept; only once."""
        kept, self._sliced = self._sliced, None
        return kept[1] if kept is not None and kept[0] is hidden else None

    def said(self) -> dict[str, Any]:
        """Plain values: `tokens` (the threshold), `base` (`sp` and `tp`, of whose product the ranks are), `batches` by
        mode and kind, `unable` by reason."""
        batches = {
            mode: {kind: self.batches[mode, kind] for kind in ("prefill", "decode")} for mode in (SEQUENCE, TENSOR)
        }
        return {
            "tokens": self._threshold,
            "base": {"sp": self.base.sp, "tp": self.base.tp},
            "batches": batches,
            "unable": dict(self.unable),
        }


def unable_reason(batch: Any, has_embeds: bool) -> str | None:
    """Why stock's batch cannot run sequence-parallel, or None. What is not known to is refused."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE):
        return f"its forward mode is {batch.forward_mode.name}"
    if has_embeds:
        return "it brings embeddings in place of token ids"
    if batch.spec_info is not None:
        return "it belongs to speculative decoding"
    if batch.multi_item_delimiter_indices is not None:
        return "it scores several items in one prompt"
    return None


def kind_of(batch: Any) -> str:
    """`decode`, or `prefill` for what computes prompts, alone or with decode steps."""
    return "decode" if batch.forward_mode.is_decode_or_idle() else "prefill"


_mode: SequenceMode | None = None


def current_mode() -> SequenceMode | None:
    """The mode of this process's model; None if it has none."""
    return _mode


def use_mode(mode: SequenceMode | None) -> None:
    """Make it the one of this process."""
    global _mode
    _mode = mode
