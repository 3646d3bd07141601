"""What the front is told once: that every engine is warm, or why the start has failed."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any


class StartReport:
    """One dict over a pipe: `status` "ready" with `max_total_num_tokens`, `max_req_input_len`, `startup_time` and
    `pids`, or `status` "failed" with `error`.

    Args:
        connection: to the front; closed when the report is made.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    @property
    def due(self) -> bool:
        """It has not been made."""
        return self._connection is not None

    def ready(self, first: dict[str, Any], infos: Iterable[dict[str, Any]], pids: list[int]) -> None:
        """Every engine is warm.

        Args:
            first: what rank 0 of the layout's first engine has reported.
            infos: what rank 0 of each engine has.
            pids: of all ranks.
        """
        self._make(
            {
                "status": "ready",
                "max_total_num_tokens": first["max_total_num_tokens"],
                "max_req_input_len": min(info["max_req_input_len"] for info in infos),
                "startup_time": first["startup_time"],
                "pids": pids,
            }
        )

    def failed(self, why: str) -> None:
        """The server cannot start."""
        self._make({"status": "failed", "error": why})

    def _make(self, report: dict[str, Any]) -> None:
        assert self._connection is not None, "the report is made once"
        self._connection.send(report)
        self._connection.close()
        self._connection = None
