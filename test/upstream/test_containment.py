"""A message that fails in an engine ends that message only."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from fastapi import HTTPException
from router_fakes import generate
from sglang.srt.managers import io_struct
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
from torch.distributed import distributed_c10d

from sglang_adapt.upstream import containment
from sglang_adapt.upstream.containment import Contained, DeliverControlFailures, FailureVote, RaiseControlFailures

RECORD = io_struct.ExpertDistributionReq(action=io_struct.ExpertDistributionReqType.START_RECORD)


def broken(message: Any) -> Any:
    raise RuntimeError("no recorder")


def test_a_request_ends_with_an_error() -> None:
    answer = msgpack_decode(msgpack_encode(Contained(broken, lambda number: False)(generate("a"))))
    assert answer.rid == "a"
    assert answer.finished_reason["status_code"] == 500
    assert "RuntimeError: no recorder" in answer.finished_reason["message"]


def test_an_answer_passes() -> None:
    assert Contained(lambda message: message.rid, lambda number: True)(generate("a")) == "a"


def test_a_control_request_that_fails_on_one_rank_ends_the_engine() -> None:
    with pytest.raises(RuntimeError, match="no recorder"):
        Contained(broken, lambda number: False)(RECORD)


def test_what_nobody_waits_for_ends_the_engine() -> None:
    with pytest.raises(RuntimeError, match="no recorder"):
        Contained(broken, lambda number: True)(io_struct.FreezeGCReq())


def test_a_control_failure_reaches_the_one_who_waits() -> None:
    failure = msgpack_decode(msgpack_encode(Contained(broken, lambda number: True)(RECORD)))
    waiting: FanOutCommunicator[Any] = FanOutCommunicator(lambda message: None, 1)
    manager = SimpleNamespace(
        _result_dispatcher=SimpleNamespace(
            _mapping={
                io_struct.FlushCacheReqOutput: print,
                io_struct.ExpertDistributionReqOutput: waiting.handle_recv,
            }
        )
    )

    async def run() -> None:
        call = asyncio.ensure_future(RaiseControlFailures.hook(FanOutCommunicator.queueing_call, waiting, RECORD))
        await asyncio.sleep(0)
        DeliverControlFailures.hook(lambda *args: pytest.fail("not a control failure"), manager, failure)
        with pytest.raises(HTTPException) as caught:
            await asyncio.wait_for(call, 5)
        assert caught.value.status_code == 500
        assert caught.value.detail == "RuntimeError: no recorder"

    asyncio.run(run())


def test_other_aborts_stay_stocks() -> None:
    seen: list[Any] = []
    abort = io_struct.AbortReq(rid="a")
    DeliverControlFailures.hook(lambda manager, message: seen.append(message), SimpleNamespace(), abort)
    assert seen == [abort]


def test_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    votes: list[bool] = []
    threads = [threading.Thread(target=lambda rank=rank: votes.append(FailureVote(rank, 2)(1))) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert votes == [True, True]
    monkeypatch.setattr(containment, "VOTE_TIMEOUT_S", 0.1)
    assert FailureVote(0, 2)(2) is False
