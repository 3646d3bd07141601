"""A store of weights: a manifest and the shared memory that it describes."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec
import torch

from sglang_adapt.memory import Region, RegionHandle, allocate, attach
from sglang_adapt.weights.manifest import Manifest
from sglang_adapt.weights.views import ExpectedParam, ViewMismatchError, checked_view, full_view, shard_view


class WeightsHandle(msgspec.Struct, frozen=True):
    """Names a filled store to other processes; small, picklable, and good for any number of them.

    Attributes:
        region: the memory.
        manifest: what it holds.
    """

    region: RegionHandle
    manifest: Manifest


class WeightStore:
    """The one copy of a model's weights, owned (`create`) or mapped (`open`) by this process."""

    def __init__(self, manifest: Manifest, region: Region) -> None:
        if region.nbytes < manifest.nbytes:
            raise ValueError(
                f"the weights of {manifest.model} take {manifest.nbytes} bytes; the region has {region.nbytes}"
            )
        self.manifest = manifest
        self.region = region

    @classmethod
    def create(cls, manifest: Manifest, device: torch.device | str) -> WeightStore:
        """Allocate an empty (zeroed) store on a device. Raises SharedMemoryError if it does not fit."""
        return cls(manifest, allocate(manifest.nbytes, device))

    @classmethod
    def open(cls, handle: WeightsHandle) -> WeightStore:
        """Map a store that another process owns, for reading. Raises what `memory.attach` raises."""
        return cls(handle.manifest, attach(handle.region, "read"))

    @property
    def handle(self) -> WeightsHandle:
        return WeightsHandle(self.region.handle, self.manifest)

    @property
    def finest_tp(self) -> int:
        return self.manifest.finest_tp

    def blocks_per_rank(self, tp_size: int) -> int:
        """How many shards of the finest TP size a rank of `tp_size` holds, T/t.

        Raises:
            ViewMismatchError: `tp_size` does not divide the finest TP size.
        """
        blocks, rest = divmod(self.finest_tp, tp_size) if tp_size > 0 else (0, 1)
        if rest:
            raise ViewMismatchError(
                f"the store of {self.manifest.model} is laid out for TP {self.finest_tp}; TP {tp_size} "
                "does not divide that, so it has no views of it. Start the keeper with a multiple of "
                "every TP size"
            )
        return blocks

    def full(self, name: str) -> torch.Tensor:
        """All that the store has of a parameter. Raises KeyError if it has none of that name."""
        return full_view(self.region.tensor, self.manifest.by_name[name])

    def shard(self, name: str, rank: int, tp_size: int) -> torch.Tensor:
        """Rank `rank`'s view of a parameter. Raises KeyError, or ViewMismatchError for an unfit rank or TP size."""
        return shard_view(self.region.tensor, self.manifest.by_name[name], *self._place(rank, tp_size))

    def views(self, model: str, expected: list[ExpectedParam], rank: int, tp_size: int) -> dict[str, torch.Tensor]:
        """Rank `rank`'s views of all parameters of a model, by name.

        Args:
            model: the model in the words that the manifest was made with.
            expected: every parameter of the model, in any order.

        Raises:
            ViewMismatchError: a parameter that only one of the two has, or that differs; names it. Or models
                that are not the same although their parameters are alike.
        """
        place, places = self._place(rank, tp_size)
        entries = self.manifest.by_name
        names = {param.name for param in expected}
        for there, here, missing in (
            ("the model", "the store", names - entries.keys()),
            ("the store", "the model", entries.keys() - names),
        ):
            if missing:
                raise ViewMismatchError(
                    f"{there} has {len(missing)} parameters that {here} has not: "
                    f"{', '.join(sorted(missing)[:4])}{', ...' if len(missing) > 4 else ''}; the engine "
                    f"and the keeper ({self.manifest.model}, TP {self.finest_tp}) were started for "
                    "different models"
                )
        buffer = self.region.tensor
        views = {param.name: checked_view(buffer, entries[param.name], place, places, param) for param in expected}
        if model != self.manifest.model:
            raise ViewMismatchError(f"the engine's model is a {model}, but the store holds a {self.manifest.model}")
        return views

    def close(self) -> None:
        """Give up this process's reference to the memory; see `memory.Region.close`."""
        self.region.close()

    def _place(self, rank: int, tp_size: int) -> tuple[int, int]:
        """Which of how many equal parts of the store is a rank's."""
        self.blocks_per_rank(tp_size)
        if not 0 <= rank < tp_size:
            raise ViewMismatchError(f"TP {tp_size} has no rank {rank}")
        part = self.manifest.part
        ranks = part.ranks(tp_size)
        if tp_size % part.of or rank not in ranks:
            raise ViewMismatchError(
                f"rank {rank} of TP {tp_size} reads other weights than {part} of {self.manifest.model}, which is what "
                "the store of its GPU has; the ranks of an engine have to be on GPUs as `core.layout` says"
            )
        return rank - ranks.start, len(ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
