"""The collectives of an engine's ranks, between threads."""

from __future__ import annotations

import threading

import torch


class ThreadGroup:
    """The collectives of `ranks` threads; each has one of these over the same board."""

    def __init__(self, rank: int, board: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        assert mine.is_contiguous(), "as NCCL and gloo want it"
        self._board[self._rank] = mine.clone()
        self._barrier.wait()
        seen = list(self._board)
        self._barrier.wait()
        return seen

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        assert input.dim() == output.dim() == 1, "stock's pynccl cuts the first dimension into parts of elements"
        output.copy_(torch.cat([other.chunk(len(self._board))[self._rank] for other in self._all(input)]))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat(self._all(input)))

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(input_)).sum(0)
