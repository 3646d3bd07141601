"""Tokens for heads and back, and sums, between an engine's ranks. Only their slices are padded, to equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Group(Protocol):
    """Of stock's `GroupCoordinator` what is needed here."""

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class TokenSlices:
    """A batch of `tokens` tokens cut into equal runs, one a rank; the last ones are padded.

    Attributes:
        tokens: of the batch, at least 1.
        rank: this one, among those that share the tokens out.
        ranks: that share them out.
    """

    tokens: int
    rank: int
    ranks: int

    @property
    def rows(self) -> int:
        """Tokens of each rank, with padding."""
        return -(-self.tokens // self.ranks)

    @property
    def padding(self) -> int:
        """Rows beyond the batch, on all ranks together."""
        return self.rows * self.ranks - self.tokens

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part `[rows]` of `[tokens]` values; padded with zeros."""
        return F.pad(values, (0, self.padding))[self.rank * self.rows : (self.rank + 1) * self.rows]


class Exchange:
    """The collectives of a batch. All ranks call the same ones in the same order.

    Args:
        slices: of the batch.
        group: of the ranks that share its tokens out.
        sums: of the ranks that have the same tokens and other parts of the weights; None if each has all of them.
    """

    def __init__(self, slices: TokenSlices, group: Group, sums: Group | None = None) -> None:
        self.slices = slices
        self._group = group
        self._sums = sums

    def sum_parts(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, width]`, this rank's part of a sum over the parts of the weights; may be written over.

        Returns:
            The sum, `[rows, width]`.
        """
        return x if self._sums is None else self._sums.all_reduce(x)

    def tokens_to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens `[rows, ranks * width]` for this rank's heads of all tokens.

        Returns:
            `[tokens, width]`.
        """
        s = self.slices
        width = x.shape[1] // s.ranks
        by_rank = x.view(s.rows, s.ranks, width).transpose(0, 1).contiguous()
        return self._swap(by_rank).view(s.ranks * s.rows, width)[: s.tokens]

    def heads_to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's heads of all tokens `[tokens, width]` for all heads of this rank's tokens.

        Returns:
            `[rows, ranks * width]`.
        """
        s = self.slices
        width = x.shape[1]
        # An attention kernel may give its output as [tokens, heads, head size] in any strides.
        by_rank = F.pad(x, (0, 0, 0, s.padding)).contiguous().view(s.ranks, s.rows, width)
        return self._swap(by_rank).transpose(0, 1).reshape(s.rows, s.ranks * width)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, width]` of all ranks' `[rows, width]`, on every rank."""
        s = self.slices
        whole = x.new_empty(s.ranks * s.rows, x.shape[1])
        self._group.all_gather_into_tensor(whole, x.contiguous())
        return whole[: s.tokens]

    def chosen_tokens(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Some tokens of all ranks' `[rows, width]`, on every rank.

        Args:
            x: this rank's rows.
            index: `[n]`, which tokens of the batch, int64; the same on all ranks.

        Returns:
            `[n, width]`.
        """
        s = self.slices
        if len(index) >= s.tokens:
            return self.all_tokens(x)[index]
        local = index - s.rank * s.rows
        absent = (local < 0) | (local >= s.rows)
        # Filled and not multiplied: a token that is not wanted may be infinite.
        mine = x[local.clamp(0, s.rows - 1)].masked_fill(absent[:, None], 0)
        return self._group.all_reduce(mine)

    def _swap(self, by_rank: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(by_rank)
        # Flat: stock's pynccl cuts the first dimension into parts of elements.
        self._group.all_to_all_single(received.view(-1), by_rank.view(-1))
        return received
