"""Which part of a sequence-parallel batch is whose: of its tokens, and of the weights.

A batch of P ranks runs as (SP = s, TP = t), s * t = P (Shift Parallelism, arXiv 2509.16495, 3.2.2 and 3.3.1): each rank
has the weights as a rank of an engine of t would, and the ranks that have the same ones share the tokens out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """One rank's part.

    Ranks that share tokens out are neighbours, `{j * s .. j * s + s - 1}`; sums are over ranks that lie s apart. So the
    heads that rank r gets for its tokens are those that it has at TP = P, block r, in stock's order, and are part of
    its own shard of the weights, `r // s`. With groups the other way round (the paper's figure 6) heads would have an
    order of their own, and KV that no other engine could read.

    Attributes:
        rank: of the engine.
        ranks: of the engine, P.
        tp: ranks that have all of the weights together, t; 1: each has all of them.

    Raises:
        ValueError: `tp` does not divide `ranks`.
    """

    rank: int
    ranks: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ranks % self.tp:
            raise ValueError(f"{self.ranks} ranks cannot share weights out in {self.tp} parts: that is no divisor")

    @property
    def sp(self) -> int:
        """Ranks that share tokens out."""
        return self.ranks // self.tp

    @property
    def slice(self) -> int:
        """Which part of the tokens is this rank's."""
        return self.rank % self.sp

    @property
    def shard(self) -> int:
        """Which part of the weights is this rank's: that of this rank at TP size `tp`."""
        return self.rank // self.sp

    @property
    def sp_groups(self) -> list[list[int]]:
        """Ranks that share tokens out and have the same weights, each group in the order of slices."""
        return [list(range(first, first + self.sp)) for first in range(0, self.ranks, self.sp)]

    @property
    def tp_groups(self) -> list[list[int]]:
        """Ranks that have the same tokens, each group in the order of shards."""
        return [list(range(first, self.ranks, self.sp)) for first in range(self.sp)]

    def __str__(self) -> str:
        return f"SP {self.sp} x TP {self.tp}"
