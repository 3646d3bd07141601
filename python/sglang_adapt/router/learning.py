"""Corrections of the times of engines, learned from what passes the router.

Learned are times of prefills and of steps where nothing else is in them: what forecasts leave out, such as queueing,
would make the times look longer than they are, and sizes that are seldom asked better than they are.

One factor stretches the steps of all batches. That few requests take less than they were measured to take does not say
that many do: of measured times, steps that are far from every target end what has been learned of slower ones, and no
more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_adapt.policy.admission import Load
from sglang_adapt.policy.limits import chunk_tokens
from sglang_adapt.policy.profile import Correction, Times
from sglang_adapt.policy.tally import Tally
from sglang_adapt.router.records import Record

_FEW_TOKENS = 8
"""So many decode steps at least say how long one takes: output comes in a bunch now and then."""
_MANY_TOKENS = 32
_SLOWNESS = 1.15
"""An engine that takes so many times as long for so many steps, and the prompts between, is slower than it was measured
to be, or than was reckoned. What is below may be the part of a prompt that is counted at the wrong end."""
_NEAR = 0.5
"""Steps of this part of a target and more decide whether it is kept."""
_MOSTLY = 3.0
"""A prompt says how long prompts take if it takes so many times as long as the step that it waits for."""


@dataclass(slots=True)
class _Span:
    """Decode steps of an engine that has nothing to read: since when, and as one of its requests has seen them."""

    rid: str
    since_ms: float
    output: int
    step_ms: float


@dataclass(slots=True)
class _Reading:
    """A prompt at an engine.

    Attributes:
        read_ms: that it takes there.
        alone: if its time is to be learned from: the same, what it waits before, and how many its engine had been sent.
        began: with its first token: the engine, what it had read by then, and its step.
    """

    read_ms: float
    alone: tuple[float, float, int] | None
    began: tuple[str, float, float] = ("", 0.0, 0.0)


class Learning:
    """See the module.

    Args:
        tally: what engines have been given and have not ended.
        tp_of: TP size of every engine, by name.
        times: by TP size, without corrections.
        measured: they are those of a profile, and not reckoned.
    """

    def __init__(self, tally: Tally, tp_of: Mapping[str, int], times: Mapping[int, Times], *, measured: bool) -> None:
        most = 4.0 if measured else 32.0
        self._measured = measured
        self._tally = tally
        self._tp_of = tp_of
        self._times = times
        self.corrections = {tp: Correction(most=most) for tp in times}
        self._sent: Counter[str] = Counter()
        self._read: defaultdict[str, float] = defaultdict(float)
        self._spans: dict[str, _Span] = {}
        self._readings: dict[str, _Reading] = {}

    def disturbed(self, holder: str) -> None:
        """A request was given to an engine: its steps from here on are not those of before."""
        self._spans.pop(holder, None)

    def sent(self, rid: str, record: Record, load: Load, own_ms: float) -> None:
        """A prompt goes to an engine; if it is alone and prompts are not cut, its time is learned from.

        Args:
            rid: its request.
            record: of it.
            load: of the engine, with this request.
            own_ms: that its prompt is to take.
        """
        name = load.engine
        self._sent[name] += 1
        self._spans.pop(name, None)
        step = load.times.decode_ms(load.requests - 1, load.context - record.tokens) if load.decoding else 0.0
        chunk = chunk_tokens(load.times, step, load.tightest_tpot_ms, load.bounds, load.share)
        uncut = record.tokens <= chunk >= load.bounds.prefill_tokens
        alone = uncut and load.prefill_tokens <= record.tokens and own_ms >= _MOSTLY * step
        # It waits for half of the step in flight, on average.
        reading = self._readings.setdefault(rid, _Reading(own_ms, None))
        reading.read_ms = own_ms
        reading.alone = (own_ms, step / 2, self._sent[name]) if alone else None

    def first(self, rid: str, record: Record, engine: str, now: float) -> None:
        """A request's first token has come."""
        self._spans.pop(engine, None)
        reading = self._readings.get(rid)
        if reading is None:
            return
        self._read[engine] += reading.read_ms
        if reading.alone is not None and record.sent_ms is not None and record.engine == engine:
            predicted, beside, sent = reading.alone
            if sent == self._sent[engine]:
                tp = self._tp_of[engine]
                predicted += self._times[tp].latency_ms
                self.corrections[tp] = self.corrections[tp].with_prefill(predicted, now - record.sent_ms - beside)

    def given(self, rid: str, total: int, engine: str, now: float, *, first: bool) -> None:
        """A request has `total` tokens now: if its engine has read nothing meanwhile, they were decode steps alone."""
        step = self._stepped(rid, total, engine, now)
        if first:
            reading = self._readings.setdefault(rid, _Reading(0.0, None))
            reading.began = (engine, self._read[engine], step or self._step_ms(engine))

    def ended(self, rid: str, record: Record, engine: str | None, *, finished: bool) -> None:
        """A request has ended; `engine` is the one that had it, if there is one."""
        if (span := self._spans.get(record.engine)) is not None and span.rid == rid:
            del self._spans[record.engine]
        reading = self._readings.pop(rid, None)
        if finished and engine is not None and reading is not None and record.output >= _MANY_TOKENS:
            assert record.first_ms is not None, "it has given tokens"
            self._learn_pace(record.output, reading, engine, record.last_ms - record.first_ms)

    def _stepped(self, rid: str, total: int, engine: str, now: float) -> float | None:
        """Returns the time of a step as it is believed to be, if it was looked up."""
        sums = self._tally.of(engine)
        if sums.unread:
            self._spans.pop(engine, None)
            return None
        span = self._spans.get(engine)
        if span is not None and (span.rid != rid or total - span.output < _FEW_TOKENS):
            return None
        step = self._step_ms(engine)
        if span is not None:
            tp = self._tp_of[engine]
            predicted, actual = (span.step_ms + step) / 2, (now - span.since_ms) / (total - span.output)
            far = self._measured and predicted < _NEAR * sums.tightest_tpot_ms
            self.corrections[tp] = self.corrections[tp].with_decode(predicted, actual, quicker=not far)
        self._spans[engine] = _Span(rid, now, total, step)
        return step

    def _learn_pace(self, output: int, reading: _Reading, engine: str, actual_ms: float) -> None:
        """Was the engine slower than if it had done one by one all that it did meanwhile, or quicker?

        An engine that is never without prompts would else never be found out. Prompts that are read together take less
        than one by one, so what is quicker only ends what has been learned of a slow spell: or it would be believed as
        long as prompts keep coming, which then wait for room that is there. Measured times that are stretched follow
        small differences as well, or a part of each slow spell would stay.
        """
        name, read, step = reading.began
        predicted = (output - 1) * (step + self._step_ms(engine)) / 2 + self._read[engine] - read
        if name != engine or self._read[engine] == read:
            return
        tp = self._tp_of[engine]
        known = self.corrections[tp]
        follows = self._measured and max(known.prefill, known.decode) > 1
        if follows or actual_ms > _SLOWNESS * predicted or _SLOWNESS * actual_ms < predicted:
            known = known.with_prefill(predicted, actual_ms, quicker=False)
            self.corrections[tp] = known.with_decode(predicted, actual_ms, quicker=False)

    def _step_ms(self, engine: str) -> float:
        """A decode step of an engine, as it is believed to be."""
        sums, tp = self._tally.of(engine), self._tp_of[engine]
        return self._times[tp].decode_ms(sums.requests, float(sums.context)) * self.corrections[tp].decode
