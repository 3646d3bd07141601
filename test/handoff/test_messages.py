"""The messages of a hand-over: they survive the wire as they are, and nothing else passes for one."""

from __future__ import annotations

import msgspec
import pytest

from sglang_adapt.core import handoff as messages
from sglang_adapt.core.block_ids import pack_ids
from sglang_adapt.core.handoff import CarriedRequest, RequestKind

REQUESTS = [
    CarriedRequest("a", RequestKind.RUNNING, 17, 18, 60, None, bytes(range(256))),
    CarriedRequest("d", RequestKind.RUNNING, 70, 71, 90, None, b"", delta=b"\x80", ahead=64),
    CarriedRequest("b", RequestKind.PREFILLING, 32, 700, 712, -3, b""),
    CarriedRequest("c", RequestKind.WAITING, 0, 50, 62, 7, b"\x80\x05"),
]
CALLS = [
    messages.SnapshotCall(3, 32, 40),
    messages.PrecopyCall(3, REQUESTS[:1], [[[5]], [[1]]], [messages.KvSource([0], [[3, 4]])]),
    messages.ExportCall(3, keep=2),
    messages.AdoptCall(
        3,
        REQUESTS,
        [[[5, 2, 9], [6], [4], []], [[1, 2, 3], [8], [7], []]],
        [
            messages.KvSource([0], [[3, 4, 8]]),
            messages.KvSource([0], [[9]]),
            messages.KvSource([1], [[6]]),
            messages.KvSource([], []),
        ],
        [pack_ids([10]), pack_ids([11])],
        ["c"],
    ),
    messages.ReleaseCall(3, ["a", "b"], keep=2),
    messages.RestoreCall(3, [pack_ids([1]), pack_ids([2])]),
    messages.AbortHeldCall(3, "a", abort_all=True),
    messages.UnexportableCall(),
]
ANSWERS = [
    messages.SnapshotAnswer(3, REQUESTS[:1], [[3, 4]], pack_ids([8])),
    messages.PrecopyAnswer(3, {"make": 1.5}),
    messages.ExportAnswer(3, REQUESTS, [[5, 2, 9], [1], [4], []], pack_ids([2, 4, 9]), {"d": "it uses a LoRA adapter"}),
    messages.AdoptAnswer(3, ["a", "b"], ["a"]),
    messages.ReleaseAnswer(3, pack_ids([2, 4, 9]), ["b"]),
    messages.RestoreAnswer(3, ["a"], pack_ids([2, 4, 9])),
    messages.AbortHeldAnswer(3, ["a"]),
    messages.UnexportableAnswer({"d": "it belongs to a session"}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_comes_through(call: messages.HandoffCall) -> None:
    assert messages.decode_call(messages.encode(call)) == call


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_comes_through_as_plain_values(call: messages.HandoffCall) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(messages.to_plain(call)))
    assert msgspec.convert(plain, messages.HandoffCall) == call


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_comes_through(answer: messages.HandoffAnswer) -> None:
    assert messages.decode_answer(messages.encode(answer), type(answer)) == answer


def test_every_message_is_in_a_list() -> None:
    """So that a new message cannot be left out of the tests above."""
    assert {type(call) for call in CALLS} == set(messages.HandoffCall.__args__)
    assert {type(answer) for answer in ANSWERS} == set(messages.HandoffAnswer.__args__)


def test_an_answer_of_another_kind_is_refused() -> None:
    data = messages.encode(messages.AbortHeldAnswer(3, []))
    with pytest.raises(msgspec.ValidationError, match="AbortHeldAnswer came where RestoreAnswer was expected"):
        messages.decode_answer(data, messages.RestoreAnswer)


@pytest.mark.parametrize(
    "data", [b'{"type": "ExportAnswer"}', b'{"type": "ExportCall"}', b'{"type": "ExportCall", "epoch": "3"}', b"{}"]
)
def test_what_is_no_call_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_call(data)
