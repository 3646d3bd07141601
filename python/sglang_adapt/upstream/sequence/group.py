"""The collectives of an engine's ranks, and of groups of them, on whatever device they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_adapt.upstream.patch import Patch
from sglang_adapt.upstream.sequence.base import Base
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


@dataclass(frozen=True)
class Groups:
    """This rank's groups.

    Attributes:
        tokens: of the ranks that share tokens out.
        sums: of the ranks that have the same tokens; None if each rank has all weights.
    """

    tokens: Group
    sums: Group | None = None


def groups_of(base: Base, engine: Any, device: torch.device) -> Groups:
    """A rank's groups. All ranks of the engine have to call this, once.

    Args:
        base: its part.
        engine: stock's GroupCoordinator of all its ranks.
        device: of the rank.
    """
    if base.tp == 1:
        return Groups(_on(engine, device))
    from sglang.srt.distributed.parallel_state import init_model_parallel_group

    backend = torch.distributed.get_backend(engine.device_group)
    # The memory of stock's own kernels for sums is spent where a sum of each layer is: not on rows for the logits.
    tokens = init_model_parallel_group(
        base.sp_groups, engine.local_rank, backend, use_custom_allreduce=False, group_name="adapt_sp"
    )
    sums = init_model_parallel_group(base.tp_groups, engine.local_rank, backend, group_name="adapt_tp")
    _own.extend((tokens, sums))
    return Groups(_on(tokens, device), _on(sums, device))


def _on(stock: Any, device: torch.device) -> Group:
    group: Group = HostGroup(stock) if device.type == "cpu" else stock
    return group


_own: list[Any] = []
"""Stock's GroupCoordinators that this process has made beside stock's own ones."""


class CaptureOwnGroups(Patch):
    """Lets the groups of sequence-parallel batches be captured in CUDA graphs.

    Stock prepares the groups that it knows (`graph_capture` in distributed/parallel_state.py): NCCL's calls are then
    made on the stream that is captured, and the buffers of its own sums registered.
    """

    target = "sglang.srt.distributed.parallel_state.graph_capture"
    kind = "around"

    @staticmethod
    def hook(original: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return _captured(original(*args, **kwargs))


@contextmanager
def _captured(stock: AbstractContextManager[Any]) -> Iterator[Any]:
    with stock as context, ExitStack() as stack:
        for group in _own:
            stack.enter_context(group.graph_capture(context))
        yield context
