"""Calls from the router to the ranks of an engine, through stock's RPC message.

Stock's rank 0 hands every message to all ranks in one iteration, between two batches, and calls
`handle_rpc_request` there. The reply leaves by the engine's one output socket, as a message of our own, in order with
all other output; stock's own RPC answers go back to whoever asked, as before. With overlap scheduling the results of
one batch may not have been processed yet when a call is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_adapt.core.messages import EngineCall, EngineNotice, EngineReply, RankAnswer
from sglang_adapt.upstream import wire
from sglang_adapt.upstream.kv_pool import EnginePool
from sglang_adapt.upstream.patch import PATCHES, Patch
from sglang_adapt.upstream.rank_link import link_of


class Control(Protocol):
    """What a rank does with the router's calls."""

    def started(self, scheduler: Any, rank: int, pool: EnginePool, gpus: tuple[int, ...]) -> None:
        """The scheduler is built, on a shared pool; the engine's ranks are on these of the deployment's GPUs."""

    def __call__(self, scheduler: Any, rank: int, call: EngineCall) -> RankAnswer:
        """Do what a call asks; what this raises ends the rank."""


_control: Control | None = None


class CallsOfTheRouter(Patch):
    """Answers the router's calls; stock would look for a method of their name, and log their arguments.

    Source: sglang/srt/managers/scheduler.py, handle_rpc_request.
    """

    target = "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request"
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        call = wire.call_of(recv_req)
        if call is None:
            return original(self, recv_req)
        if _control is None:
            raise RuntimeError("this process takes no calls of a router; call use_control before it serves")
        answer = _control(self, self.ps.tp_rank, call)
        ranks = at_rank_0(self, answer)
        if ranks is not None:
            reply = wire.reply_message(EngineReply(call.id, call.epoch, ranks))
            self.ipc_channels.send_to_detokenizer.send_output(reply)
        return None


def use_control(control: Control) -> list[str]:
    """Make the scheduler that this process is about to build answer the router's calls by `control`.

    Returns:
        The names of the patches in place.

    Raises:
        PatchError: the patch could not be applied.
    """
    global _control
    _control = control
    PATCHES.apply(CallsOfTheRouter)
    return PATCHES.verify(CallsOfTheRouter)


def finish_device_work(scheduler: Any) -> None:
    """Wait until nothing runs on this rank's GPU any more; without CUDA nothing does between two batches."""
    import torch

    if torch.device(scheduler.device).type == "cuda":
        torch.cuda.synchronize()


def notify(scheduler: Any, payload: dict[str, Any]) -> None:
    """Tell the router something unasked, from rank 0, in order with all other output; other ranks do nothing."""
    if scheduler.ps.tp_rank == 0:
        scheduler.ipc_channels.send_to_detokenizer.send_output(wire.notice_message(EngineNotice(payload)))


def at_rank_0(scheduler: Any, answer: Any) -> list[Any] | None:
    """All ranks' answers in rank 0, None in the others."""
    if scheduler.ps.tp_size == 1:
        return [answer]
    return link_of(scheduler.tp_group).gather(answer)
