"""An engine that is started anew reads prompts without graphs first and captures them in idle turns."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_adapt.upstream import late_graphs
from sglang_adapt.upstream.late_graphs import CaptureLater, CaptureWhileIdle, NoGraphBeforeItsCapture

SIZES = [4, 8, 16]


class Backend:
    """Keeps what stock's breakable backend keeps of a session."""

    _shared_output_buffer: Any = "of an earlier session"

    @contextmanager
    def capture_session(self, stream: object) -> Iterator[None]:
        self._shared_output_buffer = None
        yield


class Runner:
    """What is used of stock's PrefillCudaGraphRunner."""

    def __init__(self, backend_name: str = "breakable") -> None:
        self.prefill_backend_name = backend_name
        self.capture_num_tokens = list(SIZES)
        self.backend = Backend()
        self.device_module = SimpleNamespace(synchronize=lambda: None)
        stale = {
            name: SimpleNamespace(buffer=torch.full((16,), 7)) for name in ("input_ids", "positions", "out_cache_loc")
        }
        self.buffer_registry = SimpleNamespace(get_slot=stale.__getitem__)
        self.warmed = 0
        self.captured: list[int] = []
        self.buffers: list[int] = []
        self.fails = False

    def warmup(self) -> None:
        self.warmed += 1

    @staticmethod
    def _pad_to_bucket(tokens: int, sizes: list[int]) -> int:
        return sizes[bisect.bisect_left(sizes, tokens)]

    def capture_one_shape(self, size: int) -> None:
        for name in ("input_ids", "positions", "out_cache_loc"):
            assert not self.buffer_registry.get_slot(name).buffer[:size].any(), "KV of a request would be overwritten"
            self.buffer_registry.get_slot(name).buffer.fill_(7)
        if self.fails:
            raise RuntimeError("out of memory")
        if self.backend._shared_output_buffer is None:
            self.backend._shared_output_buffer = size
        self.captured.append(size)
        self.buffers.append(self.backend._shared_output_buffer)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state

    @contextmanager
    def graph_capture() -> Iterator[Any]:
        yield SimpleNamespace(stream="own")

    monkeypatch.setattr(parallel_state, "graph_capture", graph_capture)
    monkeypatch.setattr(late_graphs, "_late", False)
    monkeypatch.setattr(late_graphs, "_missing", None)
    late_graphs.capture_prefill_graphs_late()


def capture(runner: Runner) -> list[str]:
    """Stock's capture, as it is patched; returns whether it was stock's."""
    stock: list[str] = []
    CaptureLater.hook(lambda _: stock.append("stock's"), runner)
    return stock


def idle_turn(*, idle: bool = True) -> None:
    CaptureWhileIdle.hook(None, SimpleNamespace(is_fully_idle=lambda: idle))


def graph_for(runner: Runner, tokens: int, *, stock: bool = True) -> bool:
    return NoGraphBeforeItsCapture.hook(lambda *_: stock, runner, SimpleNamespace(input_ids=[0] * tokens))


def test_each_idle_turn_captures_the_largest_that_is_missing(late: None) -> None:
    runner = Runner()
    assert capture(runner) == []
    assert (runner.warmed, runner.captured) == (1, [])
    seen = []
    while late_graphs.graphs_are_missing():
        seen.append([graph_for(runner, tokens) for tokens in (3, 8, 9)])
        idle_turn()
    assert seen == [[False, False, False], [False, False, True], [False, True, True]]
    assert runner.captured == [16, 8, 4]
    assert runner.buffers == [16, 16, 16], "all sizes have one buffer for their output"
    assert [graph_for(runner, tokens) for tokens in (3, 8, 9)] == [True, True, True]
    idle_turn()
    assert runner.captured == [16, 8, 4]


def test_what_stock_reads_without_a_graph_stays_so(late: None) -> None:
    runner = Runner()
    capture(runner)
    assert not graph_for(runner, 100, stock=False)


def test_nothing_is_captured_while_requests_are_there(late: None) -> None:
    runner = Runner()
    capture(runner)
    idle_turn(idle=False)
    assert runner.captured == []


def test_a_first_start_and_other_backends_capture_as_stock_does(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture(Runner("full")) == ["stock's"]
    monkeypatch.setattr(late_graphs, "_late", False)
    assert capture(Runner()) == ["stock's"]
    assert not late_graphs.graphs_are_missing()


def test_a_capture_that_fails_is_not_taken_for_one(late: None) -> None:
    runner = Runner()
    capture(runner)
    runner.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        idle_turn()
    assert not graph_for(runner, 16)
    runner.fails = False
    idle_turn()
    assert graph_for(runner, 16)
