"""Dispatch: always the least loaded engine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_adapt.policy.dispatch import LeastLoaded


def test_requests_first_then_tokens_then_order() -> None:
    dispatch = LeastLoaded(["a", "b"])
    assert dispatch.least() == "a"
    dispatch.assign("a", 10)
    assert dispatch.least() == "b"
    dispatch.assign("b", 5)
    assert dispatch.least() == "b"
    dispatch.release("a", 10)
    assert dispatch.least() == "a"


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
    def release(self, engine: int) -> None:
        if self.model.get(engine):
            self.dispatch.release(engine, self.model[engine].pop())
        elif engine not in self.model:
            self.dispatch.release(engine, 1)

    def teardown(self) -> None:
        self.check()

    def check(self) -> None:
        expected = min(self.model, key=lambda e: (len(self.model[e]), sum(self.model[e]), self.order[e]), default=None)
        assert self.dispatch.least() == expected
        for engine, tokens in self.model.items():
            assert self.dispatch.load(engine) == (len(tokens), sum(tokens))

    @rule()
    def least_is_minimum(self) -> None:
        self.check()


TestAgainstPlainMinimum = AgainstPlainMinimum.TestCase
TestAgainstPlainMinimum.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
