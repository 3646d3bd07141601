"""What a keeper is to own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RegionSpec:
    """A zeroed region of memory for each GPU of a keeper.

    Attributes:
        name: by which its handle is asked for, e.g. "kv".
        nbytes: its size on one GPU.
        sized_by: the setting that decides its size, for the error when there is not enough memory.
        on_host: in host memory, whatever the GPU is: for what processes without the GPU read and write.
    """

    name: str
    nbytes: int
    sized_by: str = ""
    on_host: bool = False


@dataclass(frozen=True)
class KeeperConfig:
    """Start arguments of a keeper; picklable.

    Attributes:
        server_args: stock's ServerArgs of any of the engines (model, dtype, load format, device); the TP size in
            them is not looked at.
        finest_tp: the TP size that the store of weights is laid out for, a multiple of every engine's; None for
            a keeper without weights.
        gpu_ids: GPUs whose memory it owns; exactly one, unless they are virtual.
        regions: regions to allocate on each of the GPUs.
        environment: variables to set in the keeper's process before anything else.
    """

    server_args: Any
    finest_tp: int | None
    gpu_ids: tuple[int, ...]
    regions: tuple[RegionSpec, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gpu_ids or (self.server_args.device != "cpu" and len(self.gpu_ids) > 1):
            raise ValueError(f"a keeper owns the memory of one GPU; {len(self.gpu_ids)} were given: {self.gpu_ids}")
        names = [region.name for region in self.regions]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of a keeper's regions must differ: {', '.join(names)}")

    @property
    def name(self) -> str:
        """The keeper's name in titles and messages, e.g. `keeper_gpu0` or `keeper_gpu0-3`."""
        ids = self.gpu_ids
        return f"keeper_gpu{ids[0]}" if len(ids) == 1 else f"keeper_gpu{ids[0]}-{ids[-1]}"
