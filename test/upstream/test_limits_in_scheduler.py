"""Limits of an engine's iterations: what is set in stock's scheduler, and when decode steps go ahead of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_context

from sglang_adapt.core.messages import EngineCall
from sglang_adapt.engine.control import EngineControl
from sglang_adapt.upstream import limits
from sglang_adapt.upstream.limits import PromptsTakeTurns


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What stock is told of requests at a time."""
    told: list[int] = []
    monkeypatch.setattr(limits, "_kept", None)
    monkeypatch.setattr(
        type(get_context()), "override", lambda self, source, **fields: told.append(fields["pp_max_micro_batch_size"])
    )
    return told


def scheduler(chunk: int | None = 2048) -> Any:
    return SimpleNamespace(page_size=16, chunked_prefill_size=chunk, max_prefill_tokens=4096, max_running_requests=8)


def running(*finished: bool, prefill_only: bool = False) -> Any:
    reqs = [SimpleNamespace(finished=lambda over=over: over) for over in finished]
    return SimpleNamespace(reqs=reqs, is_prefill_only=prefill_only)


def ask(stock: Any, prefill_tokens: int | None, requests: int | None) -> str | None:
    payload = {"prefill_tokens": prefill_tokens, "requests": requests}
    return EngineControl()(stock, 0, EngineCall(1, 0, "limits", payload)).error


def test_limits_are_set_and_taken_back(slots: list[int]) -> None:
    stock = scheduler()
    assert ask(stock, 64, 3) is None
    assert (stock.chunked_prefill_size, stock.max_prefill_tokens, slots) == (64, 4096, [3])
    assert ask(stock, None, None) is None
    assert (stock.chunked_prefill_size, stock.max_prefill_tokens, slots) == (2048, 4096, [3, 8])


def test_without_chunks_whole_prompts_are_limited(slots: list[int]) -> None:
    stock = scheduler(chunk=None)
    assert ask(stock, 64, None) is None
    assert (stock.chunked_prefill_size, stock.max_prefill_tokens) == (None, 64)
    assert ask(stock, None, None) is None
    assert stock.max_prefill_tokens == 4096


@pytest.mark.parametrize(
    ("prefill_tokens", "requests", "text"),
    [
        (24, None, "24 prompt tokens are no multiple of a page, which has 16"),
        (None, 9, "9 requests cannot be the limit"),
    ],
)
def test_limits_that_cannot_be_are_refused(
    slots: list[int], prefill_tokens: int | None, requests: int | None, text: str
) -> None:
    stock = scheduler()
    error = ask(stock, prefill_tokens, requests)
    assert error is not None and text in error
    assert (stock.chunked_prefill_size, slots) == (2048, [])


def batches(stock: Any, running_batch: Any, tokens: int, count: int) -> str:
    """`p` for each batch of so many prompt tokens, `d` for each decode step."""
    prompts = SimpleNamespace(extend_num_tokens=tokens)

    def original(self: Any, running_batch: Any) -> Any:
        return SimpleNamespace(batch_to_run=prompts, running_batch=running_batch)

    plans = [PromptsTakeTurns.hook(original, stock, running_batch) for _ in range(count)]
    assert all(plan.running_batch is running_batch for plan in plans)
    return "".join("d" if plan.batch_to_run is None else "p" for plan in plans)


def test_decode_steps_follow_prompts_only_under_a_limit(slots: list[int]) -> None:
    stock = scheduler()
    assert batches(stock, running(False), 64, 3) == "ppp"
    ask(stock, 64, None)
    assert batches(stock, running(True, False), 64, 8) == "pddddpdd"
    ask(stock, None, None)
    assert batches(stock, running(False), 64, 3) == "ppp"


def test_fewer_tokens_are_followed_by_fewer_steps(slots: list[int]) -> None:
    stock = scheduler()
    ask(stock, 64, None)
    assert batches(stock, running(False), 16, 4) == "pdpd"
    assert batches(stock, running(False), 17, 6) == "pddpdd"


def test_prompts_go_on_where_nothing_decodes(slots: list[int]) -> None:
    stock = scheduler()
    ask(stock, 64, None)
    for batch in (running(), running(True), running(False, prefill_only=True)):
        assert batches(stock, batch, 64, 3) == "ppp"
