"""What lies where in a store of weights: plain data, as JSON between processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

import msgspec
import torch

ALIGNMENT = 256
"""Bytes to which each parameter's offset is aligned, as CUDA's own allocator aligns memory."""


class ParamKind(StrEnum):
    """How the shards of a parameter relate to each other."""

    COLUMN = "col"
    """Each rank has its own part of the output dimension (also: of the vocabulary)."""
    ROW = "row"
    """Each rank has its own part of the input dimension."""
    REPLICATED = "rep"
    """All ranks have the same."""


@dataclass(frozen=True)
class ShardSpec:
    """One parameter of one rank at the finest TP size.

    Attributes:
        name: as in the model's `named_parameters()`.
        kind: how the ranks' shards are joined.
        dim: along which dimension they are joined; None if they are replicated.
        shape: of one shard.
        dtype: torch's name of the element type without its prefix, e.g. "bfloat16".
    """

    name: str
    kind: ParamKind
    dim: int | None
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if (self.dim is None) != (self.kind is ParamKind.REPLICATED):
            raise ValueError(f"{self.name}: a {self.kind} parameter with joining dimension {self.dim}")
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"{self.name}: dimension {self.dim} of shape {self.shape}")


@dataclass(frozen=True)
class ParamEntry:
    """One parameter in the store: all its shards, joined.

    Attributes:
        name, kind, dim, dtype: as in `ShardSpec`.
        shape: of the joined parameter, as far as the store has it.
        offset: of its first byte in the store.
    """

    name: str
    kind: ParamKind
    dim: int | None
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Part:
    """Which part of all weights a store has: the `index`-th of `of` equal ones, as rank `index` at TP size `of`.

    Raises:
        ValueError: there is no such part.
    """

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"of {self.of} parts of the weights none has the index {self.index}")

    def ranks(self, tp_size: int) -> range:
        """The ranks of a TP size, a multiple of `of`, whose weights are in it."""
        count = tp_size // self.of
        return range(self.index * count, (self.index + 1) * count)

    def __str__(self) -> str:
        return "all weights" if self.of == 1 else f"part {self.index + 1} of {self.of} of the weights"


WHOLE = Part()


@dataclass(frozen=True)
class Manifest:
    """The contents of a store.

    Attributes:
        model: what the weights are of, in words; an engine whose own words differ is refused.
        finest_tp: the TP size T whose shards lie side by side.
        part: which of these shards are there.
        nbytes: size of the store.
        entries: the parameters, in the order of their offsets.
    """

    model: str
    finest_tp: int
    nbytes: int
    entries: tuple[ParamEntry, ...]
    part: Part = WHOLE

    @cached_property
    def by_name(self) -> dict[str, ParamEntry]:
        return {entry.name: entry for entry in self.entries}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Decode what `to_json` wrote. Raises msgspec.ValidationError if it is not a manifest."""
        return msgspec.json.decode(data, type=cls)


def plan_layout(model: str, finest_tp: int, shards: Iterable[ShardSpec], part: Part = WHOLE) -> Manifest:
    """Lay the shards of the finest TP size out side by side.

    Args:
        model: what the weights are of.
        finest_tp: the TP size T that the shards are of.
        shards: the parameters of one rank; those of all ranks are alike.
        part: which of the shards are to be there.

    Raises:
        ValueError: a TP size below 1 or that cannot be cut into such parts, a parameter named twice, or none at all.
    """
    if finest_tp < 1:
        raise ValueError(f"the finest TP size is {finest_tp}; it must be at least 1")
    if finest_tp % part.of:
        raise ValueError(f"{finest_tp} shards of {model} are no {part.of} equal parts")
    entries: list[ParamEntry] = []
    seen: set[str] = set()
    offset = 0
    for shard in shards:
        if shard.name in seen:
            raise ValueError(f"{model} names the parameter {shard.name} twice")
        seen.add(shard.name)
        shape = list(shard.shape)
        if shard.dim is not None:
            shape[shard.dim] *= len(part.ranks(finest_tp))
        entry = ParamEntry(shard.name, shard.kind, shard.dim, tuple(shape), shard.dtype, offset)
        entries.append(entry)
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    if not entries:
        raise ValueError(f"{model} has no parameters to store")
    return Manifest(model, finest_tp, offset, tuple(entries), part)
