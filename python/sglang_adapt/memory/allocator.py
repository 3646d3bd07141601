"""A check of torch's CUDA allocator settings."""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def refuse_expandable_segments(environment: Mapping[str, str]) -> None:
    """Refuse the allocator setting that CUDA IPC of torch tensors does not survive (vllm#42609).

    The regions of this package do not come from torch's allocator, but an engine's all-reduce buffers do.

    Args:
        environment: of the process to start, e.g. `os.environ`.

    Raises:
        ValueError: names the variable and what to remove from it.
    """
    for variable in _VARIABLES:
        for setting in environment.get(variable, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                raise ValueError(
                    f"{variable} sets expandable_segments:True, whose memory cannot be shared between "
                    f"processes; remove that setting"
                )
