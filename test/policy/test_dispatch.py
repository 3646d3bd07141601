"""Dispatch: always the least loaded engine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_adapt.policy.dispatch import REQUEST_TOKENS, LeastLoaded


def test_tokens_to_read_and_requests_then_order() -> None:
    dispatch = LeastLoaded(["a", "b"])
    assert dispatch.least() == "a"
    dispatch.assign("a", 10)
    assert dispatch.least() == "b"
    dispatch.assign("b", 5)
    assert dispatch.least() == "b"
    dispatch.release("a", 10)
    assert dispatch.least() == "a"


def test_requests_that_follow_those_that_ended_together_are_shared_out() -> None:
    dispatch = LeastLoaded(["a", "b"])
    for engine in ("a", "b"):
        for _ in range(32):
            dispatch.assign(engine, 2048)
            dispatch.read(engine, 2048)
    for _ in range(32):
        dispatch.release("a", 0)
    sent = {"a": 0, "b": 0}
    for _ in range(32):
        engine = dispatch.least()
        assert engine is not None
        dispatch.assign(engine, 2048)
        sent[engine] += 1
    # Those of b are about to end, too; by their number alone all would be sent to a.
    assert sent == {"a": 19, "b": 13}


def test_none_without_engines() -> None:
    dispatch: LeastLoaded[str] = LeastLoaded()
    assert dispatch.least() is None
    dispatch.add("a")
    dispatch.remove("a")
    assert dispatch.least() is None


def test_wrong_use_is_refused() -> None:
    dispatch = LeastLoaded(["a"])
    with pytest.raises(ValueError, match="already"):
        dispatch.add("a")
    with pytest.raises(ValueError, match="not in dispatch"):
        dispatch.remove("b")


class AgainstPlainMinimum(RuleBasedStateMachine):
    """The heap against the obvious minimum over all engines."""

    @initialize()
    def start(self) -> None:
        self.dispatch: LeastLoaded[int] = LeastLoaded()
        self.model: dict[int, list[int]] = {}
        """By engine the tokens of each request that are to be read."""
        self.order: dict[int, int] = {}

    @rule(engine=st.integers(0, 5))
    def add_or_remove(self, engine: int) -> None:
        if engine in self.model:
            del self.model[engine]
            self.dispatch.remove(engine)
        else:
            self.order.setdefault(engine, len(self.order))
            self.model[engine] = []
            self.dispatch.add(engine)

    @precondition(lambda self: self.model)
    @rule(tokens=st.integers(0, 3))
    def assign(self, tokens: int) -> None:
        engine = self.dispatch.least()
        assert engine is not None
        self.model[engine].append(tokens)
        self.dispatch.assign(engine, tokens)

    @rule(engine=st.integers(0, 5))
    def read(self, engine: int) -> None:
        if self.model.get(engine):
            self.dispatch.read(engine, self.model[engine][0])
            self.model[engine][0] = 0
        elif engine not in self.model:
            self.dispatch.read(engine, 1)

    @rule(engine=st.integers(0, 5))
    def release(self, engine: int) -> None:
        if self.model.get(engine):
            self.dispatch.release(engine, self.model[engine].pop())
        elif engine not in self.model:
            self.dispatch.release(engine, 1)

    def teardown(self) -> None:
        self.check()

    def check(self) -> None:
        load = {engine: len(unread) * REQUEST_TOKENS + sum(unread) for engine, unread in self.model.items()}
        expected = min(load, key=lambda engine: (load[engine], self.order[engine]), default=None)
        assert self.dispatch.least() == expected
        assert all(self.dispatch.load(engine) == tokens for engine, tokens in load.items())

    @rule()
    def least_is_minimum(self) -> None:
        self.check()


TestAgainstPlainMinimum = AgainstPlainMinimum.TestCase
TestAgainstPlainMinimum.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
