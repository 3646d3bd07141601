"""Stock messages as the router reads them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_adapt.upstream import wire


def generate(rid: str, tokens: int, **changes: Any) -> io_struct.TokenizedGenerateReqInput:
    """A stock tokenized request."""
    fields: dict[str, Any] = {
        "rid": rid,
        "input_text": "text",
        "input_ids": array("q", range(tokens)),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(max_new_tokens=4),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    return io_struct.TokenizedGenerateReqInput(**(fields | changes))


def test_format_matches_the_installed_sglang() -> None:
    wire.assert_wire_format()


def test_pickle_ipc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", True)
    with pytest.raises(wire.WireError, match="SGLANG_USE_PICKLE_IPC"):
        wire.assert_wire_format()


@given(st.text(min_size=1, max_size=40), st.integers(0, 3000))
def test_request_head(rid: str, tokens: int) -> None:
    data = msgpack_encode(generate(rid, tokens))
    assert wire.peek_tag(data) == wire.GENERATE
    read_rid, read_tokens = wire.request_head(data)
    assert read_rid == rid
    assert abs(read_tokens - tokens) <= 1


def test_batch_is_split_into_whole_messages() -> None:
    requests = [generate(f"r{i}", 10 + i) for i in range(5)]
    data = msgpack_encode(io_struct.BatchTokenizedGenerateReqInput(batch=requests))
    assert wire.peek_tag(data) == wire.BATCH_GENERATE
    parts = wire.split_batch(data)
    assert [wire.request_head(part)[0] for part in parts] == [f"r{i}" for i in range(5)]
    assert [list(msgpack_decode(part).input_ids) for part in parts] == [list(r.input_ids) for r in requests]


def test_abort_head() -> None:
    assert wire.abort_head(msgpack_encode(io_struct.AbortReq(rid="x"))) == ("x", False)
    assert wire.abort_head(msgpack_encode(io_struct.AbortReq(abort_all=True))) == ("", True)


def test_unavailable_is_a_stock_abort_with_a_503() -> None:
    message = msgpack_decode(wire.encode_unavailable("r", "engine tp1@0 is down"))
    assert isinstance(message, io_struct.AbortReq)
    assert message.rid == "r"
    assert message.finished_reason["status_code"] == 503
    assert message.finished_reason["message"] == "engine tp1@0 is down"


def test_warmup_reads_back_as_a_request() -> None:
    request = msgpack_decode(wire.encode_warmup("w", [1, 2, 3], 2))
    assert list(request.input_ids) == [1, 2, 3]
    assert request.sampling_params.max_new_tokens == 2


@pytest.mark.parametrize("data", [b"", b"\x93", b"\x93\xd9", b"\xc0", b"\x91\x01", b"\xdc\x00"])
def test_garbage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.peek_tag(data)


@given(st.binary(max_size=64))
def test_peek_tag_never_raises_anything_else(data: bytes) -> None:
    try:
        wire.peek_tag(data)
    except wire.WireError:
        return


def test_reply_tags() -> None:
    tags = wire.reply_tags()
    assert tags[b"FlushCacheReqInput"] == b"FlushCacheReqOutput"
    assert tags[b"GetInternalStateReq"] == b"GetInternalStateReqOutput"
    assert tags[b"ProfileReq"] == b"ProfileReqOutput"
    assert tags[b"LoadLoRAAdapterReqInput"] == b"LoRAUpdateOutput"
    assert b"CloseSessionReqInput" not in tags
    assert b"AbortReq" not in tags


def test_merge_succeeds_only_if_all_do() -> None:
    ok = msgpack_encode(io_struct.FlushCacheReqOutput(success=True))
    bad = msgpack_encode(io_struct.FlushCacheReqOutput(success=False, message="busy"))
    assert msgpack_decode(wire.merge_replies({"a": ok, "b": ok})).success
    merged = msgpack_decode(wire.merge_replies({"a": ok, "b": bad}))
    assert not merged.success
    assert merged.message == "b: busy"


def test_merge_internal_state_keeps_the_first_and_adds_the_engines() -> None:
    replies = {
        name: msgpack_encode(
            io_struct.GetInternalStateReqOutput(internal_state={"tp_size": size, "last_gen_throughput": 1.5})
        )
        for name, size in (("tp1@0", 1), ("tp2@0-1", 2))
    }
    state = msgpack_decode(wire.merge_replies(replies)).internal_state
    assert state["tp_size"] == 1
    assert [engine["engine"] for engine in state["adapt_engines"]] == ["tp1@0", "tp2@0-1"]
    assert state["adapt_engines"][1]["last_gen_throughput"] == 1.5


def test_a_priority_is_set_and_nothing_else_changes() -> None:
    request = generate("r", 70_000)
    request.extra_key = "k"
    before = msgpack_encode(request)
    changed = msgpack_decode(wire.with_priority(before, 2))
    assert changed.priority == 2
    changed.priority = None
    assert msgpack_encode(changed) == before
