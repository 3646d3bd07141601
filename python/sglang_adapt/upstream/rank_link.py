"""What the ranks of one engine tell one another beside their batches: a Unix socket from rank 0 to each other rank.

Stock uses gloo, by TCP, with threads of its own on both ends and several collectives a message: a switch of layout
waits for milliseconds of that, half a dozen times. A socket wakes the process that reads, and nothing else.

Everything here happens on all ranks in the same order. A rank that ends closes its sockets, and the others end with an
EOFError or OSError, as they do when gloo loses a peer.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from sglang_adapt.upstream.patch import Patch


class RankLink:
    """One rank's end.

    Args:
        others: in rank 0, the sockets of the other ranks, by rank.
        first: in every other rank, its socket to rank 0; None in rank 0.
    """

    def __init__(self, others: Sequence[Connection], first: Connection | None) -> None:
        self._others = others
        self._first = first

    @classmethod
    def open(cls, group: Any) -> RankLink:
        """Connect the ranks of a tensor-parallel group (stock's `GroupCoordinator`), all at once.

        By a socket without a file, which no kill can leave behind, and a key that only the ranks are told.
        """
        from torch.distributed import broadcast_object_list

        first = group.ranks[0]
        place: list[Any] = [f"\0sglang_adapt_ranks_{secrets.token_hex(8)}", secrets.token_bytes(32)]
        if group.rank != first:
            broadcast_object_list(place, src=first, group=group.cpu_group)
            mine = Client(place[0], "AF_UNIX", authkey=place[1])
            mine.send(group.ranks.index(group.rank))
            return cls((), mine)
        with Listener(place[0], "AF_UNIX", backlog=len(group.ranks), authkey=place[1]) as listener:
            broadcast_object_list(place, src=first, group=group.cpu_group)
            sockets = [listener.accept() for _ in group.ranks[1:]]
        by_rank = {socket.recv(): socket for socket in sockets}
        return cls([by_rank[rank] for rank in range(1, len(group.ranks))], None)

    def broadcast(self, content: list[Any] | None) -> list[Any]:
        """Rank 0's list on all ranks; what the others give is not looked at."""
        if self._first is not None:
            data = self._first.recv_bytes()
            received: list[Any] = pickle.loads(data) if data else []
            return received
        sent = content or []
        data = pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL) if sent else b""
        for other in self._others:
            other.send_bytes(data)
        return sent

    def gather(self, content: Any) -> list[Any] | None:
        """What each rank gives, by rank, on rank 0; None on the others."""
        if self._first is not None:
            self._first.send_bytes(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))
            return None
        return [content, *(pickle.loads(other.recv_bytes()) for other in self._others)]

    def all_true(self, mine: bool) -> bool:
        """Is it true on every rank?"""
        answers = self.gather(mine)
        return bool(self.broadcast(None if answers is None else [all(answers)])[0])


_link: RankLink | None = None


def link_of(group: Any) -> RankLink:
    """The link of this process's tensor-parallel group; made when it is first asked for, on all ranks at once."""
    global _link
    if _link is None:
        _link = RankLink.open(group)
    return _link


class MessagesByRankLink(Patch):
    """Brings each iteration's messages from rank 0 to the other ranks by their link. Stock broadcasts twice by gloo,
    which takes milliseconds to wake the ranks of an engine that is idle.

    With data-parallel attention, of which the ranks get different messages, it is stock's way still.

    Source: sglang/srt/managers/scheduler_components/request_receiver.py.
    """

    target = (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
        "_broadcast_reqs_across_ranks"
    )
    kind = "around"

    @staticmethod
    def hook(original: Callable[..., list[Any]], self: Any, recv_reqs: list[Any] | None) -> list[Any]:
        from sglang.srt.runtime_context import get_parallel

        if self.ps.tp_size == 1 or get_parallel().enable_dp_attention:
            return original(self, recv_reqs)
        return link_of(self.tp_group).broadcast(recv_reqs)
