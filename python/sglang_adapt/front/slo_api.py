"""`/adapt/slo`: the tiers, and how fast the engines are thought to be.

- `GET` gives both, and what a profile would have to be measured with.
- `POST` reads the file of `--adapt-slo-config` again; SIGHUP to the server does the same. A bad file is refused whole
  (400 with line and key), and the old tiers stay. Requests that have been admitted keep their terms.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sglang_adapt.core.slo import SloConfig
from sglang_adapt.core.slo_file import SloFileError, read_slo_config
from sglang_adapt.front.gate import Gate
from sglang_adapt.front.layout_api import Answer, Handler, is_loopback, refuse, refuse_stranger
from sglang_adapt.front.link import LinkClosedError
from sglang_adapt.policy.tiers import TierSettings

logger = logging.getLogger(__name__)
PATH = "/adapt/slo"


class SloApi:
    """The handlers.

    Args:
        settings: tiers, if there are any, and speed.
        gate: that holds the tiers; None without.
        tell_router: gives the router other tiers.
        has_key: the server has an admin key or an API key, which stock checks.
    """

    def __init__(
        self,
        settings: TierSettings,
        gate: Gate | None,
        tell_router: Callable[[SloConfig], Awaitable[None]],
        has_key: bool,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._tell_router = tell_router
        self._has_key = has_key

    @property
    def routes(self) -> dict[tuple[str, str], Handler]:
        """By method and path."""
        return {("GET", PATH): self.get, ("POST", PATH): self.post}

    async def get(self, body: bytes, client: str | None) -> Answer:
        config = None if self._gate is None else self._gate.config
        said: dict[str, Any] = {
            "config": msgspec.to_builtins(config),
            "source": self._settings.source,
            "speed": self._settings.speed_source,
            "profile_key": msgspec.to_builtins(self._settings.key),
            "tp_sizes": list(self._settings.tp_sizes),
            "gpus": self._settings.gpus,
            "sp_tokens": dict(self._settings.sp_tokens),
        }
        return 200, json.dumps(said).encode()

    async def post(self, body: bytes, client: str | None) -> Answer:
        if not self._has_key and not is_loopback(client):
            return refuse_stranger("tiers can be read again", client)
        if body.strip() not in (b"", b"{}"):
            return refuse(
                400,
                "bad_request",
                "tiers are read from the file of --adapt-slo-config, not from a body; change the file and send none",
            )
        if self._gate is None:
            return refuse(409, "no_tiers", "this server has no tiers; start it with --adapt-slo-config")
        try:
            fault = await self.reload()
        except LinkClosedError as error:
            return refuse(503, "draining", str(error))
        return await self.get(b"", client) if fault is None else refuse(400, "bad_slo_config", fault)

    async def reload(self) -> str | None:
        """Read the file again; returns why the old tiers stay, or None. Raises LinkClosedError."""
        gate, source = self._gate, self._settings.source
        assert gate is not None and source is not None
        try:
            config = read_slo_config(source)
            gate.reload(config)
        except (SloFileError, ValueError) as error:
            text = str(error) if isinstance(error, SloFileError) else f"{source}: {error}"
            logger.error("the tiers stay as they were: %s", text)
            return text
        await self._tell_router(config)
        logger.info("tiers read again from %s: %s", source, ", ".join(tier.name for tier in config.tiers))
        return None
