"""Counts requests that were answered early in stock's HTTP metrics, as its middleware counts all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def early_counter(path: str, status: int) -> Callable[[], None]:
    """What is to be called for each POST to `path` that was answered early with `status`.

    To be called when stock has made its metrics, which it does before its HTTP server starts.

    Raises:
        RuntimeError: they are not there. Source: `add_prometheus_track_response_middleware` of
            sglang/srt/utils/common.py.
    """
    requests = _collector("sglang:http_requests").labels(endpoint=path, method="POST")
    responses = _collector("sglang:http_responses").labels(endpoint=path, method="POST", status_code=str(status))

    def count() -> None:
        requests.inc()
        responses.inc()

    return count


def _collector(name: str) -> Any:
    from prometheus_client import REGISTRY

    found = REGISTRY._names_to_collectors.get(f"{name}_total")
    if found is None:
        raise RuntimeError(f"stock has no metric {name}_total; this sglang counts HTTP requests in another way")
    return found
