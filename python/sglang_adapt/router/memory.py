"""What the keepers are to own on each GPU, and what the engines and the ledgers get of it."""

from __future__ import annotations

from sglang_adapt.core.copy_path import CopyPath
from sglang_adapt.core.layout import EngineSpec, nesting, shard_on
from sglang_adapt.keeper import KeeperConfig, RegionSpec, StagedSpec
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.kv.staged import BUFFERS
from sglang_adapt.kv.staged_handle import KvHandle
from sglang_adapt.kv.staging import buffer_bytes
from sglang_adapt.memory import RegionHandle
from sglang_adapt.router.args import RouterArgs
from sglang_adapt.router.keepers import Keepers
from sglang_adapt.upstream.kv_pool import RankPool
from sglang_adapt.weights import Part, WeightsHandle

_KV_REGION = "kv"
_LEDGER_REGION = "ledger"
_LINK_REGION = "kv_link"


def keeper_configs(args: RouterArgs) -> list[KeeperConfig]:
    """One keeper a GPU. Virtual GPUs that need the same weights share one, because their memory is the host's."""
    config = args.config
    if not config.share_weights:
        return []
    finest, parts = config.tp_sizes[-1], nesting(config.tp_sizes)
    groups = (
        [tuple(gpu for gpu in range(config.gpus) if shard_on(gpu, parts) == index) for index in range(parts)]
        if config.virtual
        else [(gpu,) for gpu in range(config.gpus)]
    )
    return [
        KeeperConfig(
            args.server_args[finest],
            finest,
            tuple(args.device(gpu) for gpu in group),
            _regions(args),
            environment=args.environment,
            part=Part(shard_on(group[0], parts), parts),
            staged=_staged(args),
        )
        for group in groups
    ]


def _regions(args: RouterArgs) -> tuple[RegionSpec, ...]:
    """What every keeper owns beside the weights."""
    if args.pool is None:
        return ()
    geometry = args.pool.geometry
    return (
        RegionSpec(_KV_REGION, geometry.region_bytes, sized_by="--max-total-tokens"),
        RegionSpec(_LEDGER_REGION, ledger_bytes(geometry), on_host=True),
        *_link(args, geometry),
    )


def _link(args: RouterArgs, geometry: PoolGeometry) -> tuple[RegionSpec, ...]:
    """The buffers by which KV leaves a GPU that the others do not reach."""
    if args.config.kv_copy is not CopyPath.STAGED:
        return ()
    size = buffer_bytes(geometry.planes, geometry.block_bytes, virtual=args.config.virtual)
    return (RegionSpec(_LINK_REGION, BUFFERS * size, on_host=True),)


def _staged(args: RouterArgs) -> StagedSpec | None:
    if args.pool is None or args.config.kv_copy is not CopyPath.STAGED:
        return None
    return StagedSpec(args.pool.geometry, _KV_REGION, _LINK_REGION, args.config.run_dir)


class KeptMemory:
    """The keepers' memory, by the deployment's GPUs.

    Args:
        args: of the router.
        keepers: that own it.
    """

    def __init__(self, args: RouterArgs, keepers: Keepers) -> None:
        self._args = args
        self._keepers = keepers

    def weights(self, gpu: int) -> WeightsHandle | None:
        """As `Keepers.weights`."""
        return self._keepers.weights(self._args.device(gpu))

    def kv_handles(self) -> dict[int, KvHandle]:
        """How the KV of each GPU is reached. Raises KeeperError if a keeper is not ready."""
        if self._args.config.kv_copy is CopyPath.STAGED:
            return {gpu: self._keepers.staged(self._args.device(gpu)) for gpu in range(self._args.config.gpus)}
        return {**self._on_all(_KV_REGION)}

    def ledger_regions(self) -> dict[int, RegionHandle]:
        """The region of each GPU's ledger. Raises KeeperError if a keeper is not ready."""
        return self._on_all(_LEDGER_REGION)

    def rank_pool(self, spec: EngineSpec, rank: int, pages: list[int]) -> RankPool:
        """What a rank gets of its GPU's KV pool, with the pages that it may use at first."""
        pool = self._args.pool
        assert pool is not None
        region = self._keepers.region(_KV_REGION, self._args.device(spec.gpus[rank]))
        return RankPool(pool.geometry, region, tuple(pages), pool.request_tokens, tuple(spec.gpus))

    def _on_all(self, region: str) -> dict[int, RegionHandle]:
        return {gpu: self._keepers.region(region, self._args.device(gpu)) for gpu in range(self._args.config.gpus)}
