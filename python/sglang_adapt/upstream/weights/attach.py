"""Making this process's stock scheduler run on shared weights."""

from __future__ import annotations

from typing import Any

from sglang_adapt.upstream.patch import PATCHES, Patch
from sglang_adapt.weights import WeightsHandle

_handle: WeightsHandle | None = None


class LoadFromStore(Patch):
    """Loads the model through `ViewLoader`; stock would read the checkpoint.

    A speculative draft model is another model and is loaded as stock does. Not done by
    `ServerArgs.load_format = ViewLoader`, because stock reports its server arguments over sockets, which cannot
    carry a class.
    """

    target = "sglang.srt.model_executor.model_runner.load_model_with_memory_saver"
    kind = "around"

    @staticmethod
    def hook(original: Any, *, load_config: Any, is_draft_worker: bool, **kwargs: Any) -> Any:
        from unittest.mock import patch

        from sglang_adapt.upstream.weights.loader import ViewLoader

        def get_view_loader(load_config: Any, model_config: Any = None) -> ViewLoader:
            assert _handle is not None, "use_store sets it before it applies this patch"
            return ViewLoader(load_config, _handle)

        if is_draft_worker:
            return original(load_config=load_config, is_draft_worker=True, **kwargs)
        with patch(f"{original.__module__}.get_model_loader", get_view_loader):
            return original(load_config=load_config, is_draft_worker=False, **kwargs)
