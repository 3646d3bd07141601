"""The view that a rank of some TP size has of a parameter in the store. No copy is ever made here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_adapt.weights.manifest import ParamEntry, ParamKind


class ViewMismatchError(ValueError):
    """The store does not hold what a model expects; the text names the parameter."""


@dataclass(frozen=True)
class ExpectedParam:
    """What a model expects of one of its parameters.

    Attributes:
        name: as in the model's `named_parameters()`.
        kind: how the model's layer shards it.
        shape: of the rank's view; more than the stock parameter's where the store repeats KV heads.
        dtype: of its elements.
    """

    name: str
    kind: ParamKind
    shape: tuple[int, ...]
    dtype: torch.dtype


def full_view(buffer: torch.Tensor, entry: ParamEntry) -> torch.Tensor:
    """A parameter, all that the store has of it.

    Args:
        buffer: the store's bytes, uint8 [nbytes].
        entry: where the parameter lies.
    """
    return buffer[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


def shard_view(buffer: torch.Tensor, entry: ParamEntry, rank: int, tp_size: int) -> torch.Tensor:
    """One of `tp_size` equal parts of what the store has of a parameter: rows of it, columns (strided), or all of it.

    Args:
        buffer: the store's bytes, uint8 [nbytes].
        entry: where the parameter lies.
        rank: which part, 0 <= rank < tp_size.
        tp_size: how many; must divide the number of the store's shards. See `store.WeightStore.shard`.

    Raises:
        ViewMismatchError: the parameter cannot be cut into `tp_size` equal parts.
    """
    whole = full_view(buffer, entry)
    if entry.dim is None:
        return whole
    size, rest = divmod(entry.shape[entry.dim], tp_size)
    if rest:
        raise ViewMismatchError(
            f"{entry.name}: dimension {entry.dim} of {entry.shape} cannot be cut into {tp_size} equal parts"
        )
    return whole.narrow(entry.dim, rank * size, size)


def checked_view(
    buffer: torch.Tensor, entry: ParamEntry, rank: int, tp_size: int, expected: ExpectedParam
) -> torch.Tensor:
    """`shard_view`, after checking it against what the model expects.

    Raises:
        ViewMismatchError: name, kind, shape or element type differ; the text names the parameter and both.
    """
    view = shard_view(buffer, entry, rank, tp_size)
    stored = (entry.name, entry.kind, tuple(view.shape), view.dtype)
    wanted = (expected.name, expected.kind, expected.shape, expected.dtype)
    if stored != wanted:
        raise ViewMismatchError(
            f"{expected.name}: rank {rank} of {tp_size} expects {_describe(*wanted[1:])}, but the store "
            f"holds {_describe(*stored[1:])} (as {entry.name}); the engine and the keeper were started for "
            f"different models, dtypes or TP sizes"
        )
    return view


def _describe(kind: ParamKind, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{kind.name.lower()} {list(shape)} {str(dtype).removeprefix('torch.')}"
