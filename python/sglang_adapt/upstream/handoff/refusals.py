"""What cannot be carried: engines of a kind that no one has tried, and requests with state outside the lists."""

from __future__ import annotations

from array import array
from typing import Any

from sglang_adapt.upstream.handoff.state import KNOWN, REFUSED, new_req

_PLAIN = (bool, int, float, str, list, dict, array)


class HandoffUnsupportedError(RuntimeError):
    """An engine whose requests cannot be moved; the text names the setting."""


def check_engine(scheduler: Any) -> None:
    """Check at start that requests of this engine can be moved at all.

    Raises:
        HandoffUnsupportedError: naming the setting and what to do.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    for unsupported, setting in (
        (not scheduler.is_generation, "an embedding or reward model"),
        (not scheduler.spec_algorithm.is_none(), "speculative decoding (--speculative-algorithm)"),
        (scheduler.ps.pp_size > 1, "pipeline parallelism (--pp-size)"),
        (scheduler.ps.dp_size > 1, "data parallelism inside an engine (--dp-size)"),
        (scheduler.disaggregation_mode != DisaggregationMode.NULL, "prefill-decode splitting (--disaggregation-mode)"),
        (scheduler.is_mixed_chunk, "--enable-mixed-chunk"),
        (scheduler.dllm_config is not None, "a diffusion language model"),
        (scheduler.is_hybrid_swa, "sliding window attention with a KV pool of its own"),
        (scheduler.is_hybrid_ssm, "a model with state-space layers"),
        (scheduler.enable_hisparse, "--enable-hisparse"),
        (
            type(scheduler.tree_cache) not in (RadixCache, ChunkCache),
            f"a prefix cache of type {type(scheduler.tree_cache).__name__}",
        ),
    ):
        if unsupported:
            raise HandoffUnsupportedError(
                f"requests cannot be moved to or from an engine with {setting}; start it with one layout only"
            )


def reason_to_stay(req: Any) -> str | None:
    """Why a request cannot be carried, or None if it can."""
    there, first = vars(req), vars(new_req())
    if not there.keys() <= KNOWN:
        return f"its attribute {next(name for name in there if name not in KNOWN)} is not known"
    for name, reason in REFUSED.items():
        # Nearly all are the very same None or 0.
        if name in there and there[name] is not first[name] and not _same(there[name], first[name]):
            return reason
    return None


def _same(value: Any, other: Any) -> bool:
    """Equal, of one type, and plain enough to be compared."""
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)
