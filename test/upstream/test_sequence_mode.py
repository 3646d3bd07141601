"""Which batches run sequence-parallel, how they are counted, and what of that can be changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_adapt.core.messages import EngineCall
from sglang_adapt.engine.control import EngineControl
from sglang_adapt.upstream.sequence import mode as modes
from sglang_adapt.upstream.sequence.base import Base
from sglang_adapt.upstream.sequence.counting import CountGraphReplays
from sglang_adapt.upstream.sequence.group import Groups
from sglang_adapt.upstream.sequence.mode import SequenceMode


class NoGroup:
    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_


def batch(mode: ForwardMode = ForwardMode.EXTEND, **fields: Any) -> Any:
    return SimpleNamespace(**{"forward_mode": mode, "spec_info": None, "multi_item_delimiter_indices": None, **fields})


def make(threshold: int | None) -> SequenceMode:
    return SequenceMode(Base(0, 2), Groups(NoGroup()), threshold)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SequenceMode:
    made = make(8)
    monkeypatch.setattr(modes, "_mode", made)
    return made


def call(payload: dict[str, Any]) -> Any:
    return EngineControl()(None, 0, EngineCall(1, 0, "sequence", payload))


@pytest.mark.parametrize(
    ("threshold", "tokens", "runs"),
    [(None, 10**6, False), (0, 1, True), (1, 1, True), (0, 0, False), (8, 7, False), (8, 8, True), (8, 9, True)],
)
def test_the_threshold(threshold: int | None, tokens: int, runs: bool) -> None:
    exchange = make(threshold).choose(tokens, batch(), has_embeds=False)
    assert (exchange is not None) == runs
    assert exchange is None or exchange.slices.tokens == tokens


@pytest.mark.parametrize(
    ("fields", "embeds", "reason"),
    [
        ({"mode": ForwardMode.TARGET_VERIFY}, False, "its forward mode is TARGET_VERIFY"),
        ({"mode": ForwardMode.SPLIT_PREFILL}, False, "its forward mode is SPLIT_PREFILL"),
        ({"spec_info": object()}, False, "speculative decoding"),
        ({"multi_item_delimiter_indices": []}, False, "several items"),
        ({}, True, "embeddings in place of token ids"),
    ],
)
def test_what_cannot_run_so_says_why(
    fields: dict[str, Any], embeds: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    mode = make(1)
    for _ in range(3):
        assert mode.choose(4, batch(**fields), embeds) is None
    [(said, count)] = mode.said()["unable"].items()
    assert reason in said and count == 3
    assert len([record for record in caplog.records if reason in record.message]) == 1
    # Too small a batch was not wanted, and is not missed.
    small = make(9)
    assert small.choose(4, batch(**fields), embeds) is None and small.unable.total() == 0


def test_the_router_sets_and_reads_it(current: SequenceMode) -> None:
    current.count("sp", "prefill")
    answer = call({})
    assert answer.answer["tokens"] == 8
    assert answer.answer["batches"] == {"sp": {"prefill": 1, "decode": 0}, "tp": {"prefill": 0, "decode": 0}}
    assert call({"tokens": None}).answer["tokens"] is None
    assert not current.wants(10**9)
    assert "negative" in call({"tokens": -1}).error
    assert current.threshold is None


def test_an_engine_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_mode", None)
    assert "start the server with --adapt-sp" in call({}).error


def test_replays_of_graphs_count_as_they_were_captured(current: SequenceMode) -> None:
    told: list[tuple[str, str]] = []
    current.counted = lambda mode, kind: told.append((mode, kind))
    current.captured("tp", "decode", 4)
    current.captured("sp", "decode", 8)
    for tokens in (1, 4, 5, 8):
        ran = batch(ForwardMode.DECODE, input_ids=torch.zeros(tokens))
        CountGraphReplays.hook(SimpleNamespace(can_run_graph=True), None, ran)
        CountGraphReplays.hook(SimpleNamespace(can_run_graph=False), None, ran)
    assert told == [("tp", "decode")] * 2 + [("sp", "decode")] * 2
    # A graph keeps its mode, so that another threshold would be half true.
    assert "CUDA graphs" in call({"tokens": 1}).error and current.threshold == 8


def test_sliced_states_are_made_whole_once_and_only_those() -> None:
    mode, hidden = make(1), torch.zeros(2, 3)
    exchange = mode.choose(4, batch(), has_embeds=False)
    assert exchange is not None
    mode.keep_sliced(hidden, exchange)
    assert mode.take_sliced(hidden) is exchange
    assert mode.take_sliced(hidden) is None
    mode.keep_sliced(hidden, exchange)
    assert mode.take_sliced(torch.zeros(2, 3)) is None
