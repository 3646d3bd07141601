"""Reading a checkpoint again: the bytes do come from its files, and each rank has its share of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from sglang.srt import runtime_context

from sglang_adapt.demo import demo_model_path
from sglang_adapt.upstream.front import parse_server_args
from sglang_adapt.upstream.weights.again import NotReadError, read_again


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes stock's arguments those of this process, as they are in a rank."""

    def made(*more: str, model: Path | None = None) -> Any:
        found = parse_server_args(["--model-path", str(model or demo_model_path()), "--dtype", "float32", *more])
        context = runtime_context._CONTEXT
        for kept in ("_server_args", "_config_bags"):
            monkeypatch.setattr(context, kept, getattr(context, kept))
        runtime_context.publish(found, role="scheduler")
        return found

    return made


def sizes() -> tuple[int, int]:
    """Bytes of the demo model's checkpoint, of all tensors and of matrices."""
    with safe_open(demo_model_path() / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    sizes = [(one.numel() * one.element_size(), one.dim()) for one in tensors]
    return sum(size for size, _ in sizes), sum(size for size, dim in sizes if dim > 1)


def test_all_of_the_checkpoint_is_read_or_a_ranks_share(args: Callable[..., Any]) -> None:
    whole, matrices = sizes()
    assert read_again(args(), 0) == whole
    halves = [read_again(args("--tp-size", "2"), rank) for rank in (0, 1)]
    assert halves == [whole - matrices // 2] * 2


def test_it_is_the_file_that_is_read(args: Callable[..., Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model_path(), model)
    made = args(model=model)
    (model / "model.safetensors").unlink()
    with pytest.raises(Exception, match="model weights"):
        read_again(made, 0)


def test_without_a_checkpoint_there_is_nothing_to_read(args: Callable[..., Any]) -> None:
    with pytest.raises(NotReadError, match="--load-format dummy"):
        read_again(args("--load-format", "dummy"), 0)
