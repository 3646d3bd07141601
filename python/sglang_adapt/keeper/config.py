"""What a keeper is to own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.weights import WHOLE, Part


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
class StagedSpec:
    """That a keeper sends the KV of its GPUs to those that do not reach it (`kv.staged_server`).

    Attributes:
        geometry: shapes of the KV region.
        kv, link: names of the regions that hold the KV, and the two link buffers, on the host.
        folder: private, for the sockets.
    """

    geometry: PoolGeometry
    kv: str
    link: str
    folder: str


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
        part: of the weights, which ranks on these GPUs read.
        staged: how it sends KV; None if each GPU reads the memory of the others.
    """

    server_args: Any
    finest_tp: int | None
    gpu_ids: tuple[int, ...]
    regions: tuple[RegionSpec, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    part: Part = WHOLE
    staged: StagedSpec | None = None

    def __post_init__(self) -> None:
        if not self.gpu_ids or (self.server_args.device != "cpu" and len(self.gpu_ids) > 1):
            raise ValueError(f"a keeper owns the memory of one GPU; {len(self.gpu_ids)} were given: {self.gpu_ids}")
        names = [region.name for region in self.regions]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of a keeper's regions must differ: {', '.join(names)}")

    @property
    def name(self) -> str:
        """The keeper's name in titles and messages, e.g. `keeper_gpu0`, `keeper_gpu0-3` or `keeper_gpu0,2`."""
        ids = self.gpu_ids
        in_a_row = len(ids) > 1 and ids == tuple(range(ids[0], ids[0] + len(ids)))
        return f"keeper_gpu{ids[0]}-{ids[-1]}" if in_a_row else f"keeper_gpu{','.join(map(str, ids))}"
