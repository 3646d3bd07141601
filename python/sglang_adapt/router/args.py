"""What the router's process is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_adapt.core.config import AdaptConfig
from sglang_adapt.kv.sizing import PoolSettings
from sglang_adapt.policy.tiers import TierSettings


@dataclass(frozen=True)
class RouterArgs:
    """What the router's process needs; picklable.

    Attributes:
        config: the deployment.
        server_args: stock ServerArgs by TP size.
        port_args: stock PortArgs of the front: where requests come from and answers go to.
        control_endpoint: where the front listens for `core.messages`.
        environment: the front's environment.
        pool: the KV pool of every GPU; None for a deployment of one TP size, whose engines have their own.
        tiers: tiers, if there are any, and how fast the engines are.
    """

    config: AdaptConfig
    server_args: dict[int, Any]
    port_args: Any
    control_endpoint: str
    environment: dict[str, str]
    pool: PoolSettings | None = None
    tiers: TierSettings | None = None

    @property
    def any_server_args(self) -> Any:
        """Stock ServerArgs, for what is the same at every TP size."""
        return next(iter(self.server_args.values()))

    def device(self, gpu: int) -> int:
        """The device index of one of the deployment's GPUs."""
        args = self.any_server_args
        index: int = args.base_gpu_id + gpu * args.gpu_id_step
        return index
