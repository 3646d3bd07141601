"""The collectives of an engine's ranks, on whatever device they are."""

from __future__ import annotations

from typing import Any

import torch

from sglang_adapt.upstream.sequence.exchange import Group


class HostGroup:
    """A stock group on virtual GPUs, where stock has operators of its own for the sum only.

    Args:
        stock: its GroupCoordinator.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        torch.distributed.all_to_all_single(output, input, group=self._stock.device_group)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        torch.distributed.all_gather_into_tensor(output, input, group=self._stock.device_group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self._stock.all_reduce(input_)
        return summed


def group_of_ranks(stock: Any, device: torch.device) -> Group:
    """The group of an engine's ranks, by stock's GroupCoordinator of it; on GPUs that itself."""
    group: Group = HostGroup(stock) if device.type == "cpu" else stock
    return group
