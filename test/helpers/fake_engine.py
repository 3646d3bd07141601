"""What the ranks of one engine know and answer, without ranks: requests with their blocks, the lease, what is held."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

from sglang_adapt.core.block_ids import pack_ids, unpack_ids
from sglang_adapt.core.handoff import (
    AdoptAnswer,
    AdoptCall,
    CarriedRequest,
    ExportAnswer,
    ExportCall,
    HandoffCall,
    PrecopyAnswer,
    PrecopyCall,
    ReleaseAnswer,
    ReleaseCall,
    RequestKind,
    RestoreAnswer,
    RestoreCall,
    SnapshotAnswer,
    SnapshotCall,
    UnexportableAnswer,
    UnexportableCall,
)
from sglang_adapt.core.handover import (
    AheadCall,
    ForgetCall,
    HandoverAnswer,
    HandoverCall,
    KeepCall,
    LeaveCall,
    LetGoCall,
    PartRead,
    Prefilled,
    TakeOverCall,
)
from sglang_adapt.core.layout import EngineSpec, candidate_engines
from sglang_adapt.kv.sizing import KvShape, size_pool
from sglang_adapt.router.calls import CallRefusedError

SETTINGS = size_pool(KvShape(2, 4, 32, 2), (1, 2), 16, 1600, (4, 2))
SPECS = {spec.name: spec for spec in candidate_engines((1, 2), 2)}


@dataclass
class Early:
    """What came ahead of a request: tokens, the blocks for all of it, and those that it was copied from."""

    rid: str
    tokens: int
    blocks: list[list[int]]
    source: list[list[int]]


class FakeEngine:
    """What the ranks of one engine know: requests with their blocks, the lease, and what is held."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.page = SETTINGS.geometry.tokens_per_block(spec.tp)
        self.lease: list[set[int]] = []
        self.running: dict[str, tuple[int, list[list[int]]]] = {}
        self.held: tuple[int, dict[str, tuple[int, list[list[int]]]]] | None = None
        self.given_up: set[str] = set()
        self.staying: dict[str, str] = {}
        self.most: dict[str, int] = {}
        self.told: tuple[int, dict[str, tuple[int, list[list[int]]]]] = (0, {})
        self.ahead: tuple[int, dict[str, tuple[int, list[list[int]]]]] = (0, {})
        self.unread: set[str] = set()
        self.hands_over = False
        self.leaving: dict[int, tuple[str, int, list[list[int]]]] = {}
        self.gone: set[int] = set()
        self.coming: dict[str, tuple[int, list[list[int]]]] = {}
        self.unit = 0
        self.parts: dict[str, int] = {}
        self.early: dict[int, Early] = {}
        self.lives = 0
        self.holds = 0

    def begin(self, lease: list[list[int]]) -> None:
        self.unread, self.hands_over, self.leaving, self.gone, self.coming = set(), False, {}, set(), {}
        self.unit, self.parts, self.early = 0, {}, {}
        self.lives += 1
        self.lease = [set(pages) for pages in lease]
        self.running, self.held, self.given_up = {}, None, set()
        self.told, self.ahead = (0, {}), (0, {})

    def take(self, rid: str, tokens: int) -> None:
        """Run a request; its KV goes into free blocks of the lease, or, if they do not suffice, it waits without."""
        count = -(-tokens // self.page)
        self.most[rid] = tokens + 4
        free = [sorted(self._free(rank)) for rank in self.ranks]
        if min(map(len, free)) < count:
            tokens, count = 0, 0
        self.running[rid] = (tokens, [pages[:count] for pages in free])
        self.unread.add(rid)
        self.parts.pop(rid, None)

    def _free(self, rank: int) -> set[int]:
        held = [blocks for _, _, blocks in self.leaving.values()]
        held += [early.blocks for early in self.early.values()]
        there = [blocks for _, blocks in (*self.running.values(), *self.coming.values())]
        return self.lease[rank] - {page for blocks in (*held, *there) for page in blocks[rank]}

    def prefill(self) -> tuple[list[str], Prefilled | None]:
        """Read all prompts for which there is room: who has a first token now, and what is told of them."""
        read = [rid for rid in self.unread if rid in self.running and self.running[rid][0]]
        self.unread = {rid for rid in self.unread if rid in self.running} - set(read)
        if not read or not self.hands_over:
            return read, None
        told = Prefilled([], [], [], monotonic())
        for rid in read:
            tokens, blocks = self.running.pop(rid)
            self.holds += 1
            self.leaving[self.holds] = (rid, tokens, blocks)
            told.requests.append(
                CarriedRequest(rid, RequestKind.RUNNING, tokens, tokens + 1, self.most[rid], None, b"-")
            )
            told.holds.append(self.holds)
            told.blocks.append(blocks)
        return read, told

    def read_part(self, rid: str, tokens: int) -> PartRead | None:
        """Read a prompt up to a token, less than all of it: what is told. Up to its first token: that it is read."""
        if not self.hands_over or rid not in self.unread or not self.running.get(rid, (0,))[0]:
            return None
        kv, blocks = self.running[rid]
        first, end = self.parts.get(rid, 0), min(tokens, kv - 1) // self.unit * self.unit
        if end <= first and (rid in self.parts or end):
            return None
        self.parts[rid] = end
        mine = [rank[first // self.page : end // self.page] for rank in blocks]
        return PartRead(rid, first, end, kv + 1, self.most[rid], mine)

    # A hand-over.

    def hand_over(self, call: HandoverCall) -> HandoverAnswer:
        """What each rank answers to a step of a hand-over."""
        match call:
            case LeaveCall():
                self.hands_over, self.unit = call.on, call.unit
                self.parts.clear()
            case AheadCall():
                self._bring(call)
            case ForgetCall():
                for number in call.numbers:
                    self.early.pop(number, None)
            case TakeOverCall():
                return self._take_over(call)
            case LetGoCall():
                for hold in call.holds:
                    del self.leaving[hold]
                    self.gone.discard(hold)
            case KeepCall():
                kept = [hold for hold in call.holds if hold not in self.gone]
                for hold in kept:
                    rid, tokens, blocks = self.leaving.pop(hold)
                    assert rid not in self.running
                    self.running[rid] = (tokens, blocks)
                return HandoverAnswer(kept)
        return HandoverAnswer()

    def _bring(self, call: AheadCall) -> None:
        """A part of a prompt comes ahead."""
        early = self.early.get(call.number)
        per_block = SETTINGS.geometry.tokens_per_block(len(call.source.gpus))
        assert [len(mine) for mine in call.source.blocks] == [(call.end - call.first) // per_block] * len(
            call.source.gpus
        )
        if early is None:
            count, free = -(-(call.tokens - 1) // self.page), [sorted(self._free(rank)) for rank in self.ranks]
            if call.first or min(map(len, free)) < count:
                raise CallRefusedError(f"{self.spec}: no room, or it was given up")
            early = Early(call.rid, 0, [pages[:count] for pages in free], [[] for _ in call.source.gpus])
        assert (early.rid, early.tokens) == (call.rid, call.first)
        source = [[*mine, *pages] for mine, pages in zip(early.source, call.source.blocks, strict=True)]
        self.early[call.number] = Early(call.rid, call.end, early.blocks, source)

    def _take_over(self, call: TakeOverCall) -> HandoverAnswer:
        """Make requests of what has come ahead and free blocks; they run when `coming` has been emptied."""
        came = 0
        here = {*self.running, *self.coming}
        assert not here & {request.rid for request in call.requests}
        made: dict[str, tuple[int, list[list[int]]]] = {}
        free = [sorted(self._free(rank)) for rank in self.ranks]
        for request, source, number in zip(call.requests, call.sources, call.ahead, strict=True):
            early = self.early.get(number)
            first: list[list[int]] = [[] for _ in free]
            if early is not None:
                assert early.rid == request.rid
                for mine, whole in zip(early.source, source.blocks, strict=True):
                    assert mine == whole[: len(mine)]
                first, came = early.blocks, came + early.tokens
            count = -(-request.kv_tokens // self.page) - len(first[0])
            if min(map(len, free)) < count:
                raise CallRefusedError(f"{self.spec}: no room")
            assert request.most_tokens <= SETTINGS.request_tokens[self.spec.tp]
            self.most[request.rid] = request.most_tokens
            blocks = [[*mine, *pages[:count]] for mine, pages in zip(first, free, strict=True)]
            made[request.rid] = (request.kv_tokens, blocks)
            free = [pages[count:] for pages in free]
        self.coming |= made
        for number in call.ahead:
            self.early.pop(number, None)
        return HandoverAnswer(ahead_tokens=came, steps_ms={"make": 1.0})

    # A switch.

    @property
    def ranks(self) -> range:
        return range(self.spec.tp)

    def answer(self, call: HandoffCall) -> list[Any]:
        """What each rank answers to a step of a switch."""
        match call:
            case UnexportableCall():
                return [UnexportableAnswer(self.staying) for _ in self.ranks]
            case SnapshotCall():
                return self._snapshot(call)
            case PrecopyCall():
                return self._precopy(call)
            case ExportCall():
                return self._export(call)
            case AdoptCall():
                return self._adopt(call)
            case ReleaseCall():
                return self._release(call)
            case RestoreCall():
                return self._restore(call)
        raise AssertionError(call)

    def _snapshot(self, call: SnapshotCall) -> list[SnapshotAnswer]:
        """Say what runs here, and give free blocks back."""
        self.told = (call.epoch, {})
        for rid, (kv, blocks) in self.running.items():
            if kv:
                ahead = kv // call.unit * call.unit
                self.told[1][rid] = (ahead, [rank[: ahead // self.page] for rank in blocks])
        told = [
            CarriedRequest(
                rid,
                RequestKind.RUNNING,
                self.running[rid][0],
                self.running[rid][0] + 1,
                self.most[rid],
                None,
                b"-",
                ahead=ahead,
            )
            for rid, (ahead, _) in self.told[1].items()
        ]
        given = self._shrink(len(self.lease[0]) - max(0, len(self._free(0)) - call.leave))
        return [
            SnapshotAnswer(
                call.epoch,
                told if rank == 0 else [],
                [blocks[rank] for _, blocks in self.told[1].values()],
                given[rank],
            )
            for rank in self.ranks
        ]

    def _precopy(self, call: PrecopyCall) -> list[PrecopyAnswer]:
        """Requests come ahead, with the KV of their whole blocks."""
        self.ahead = (call.epoch, {})
        for at, request in enumerate(call.requests):
            assert request.state == b"-"
            mine = [call.blocks[rank][at] for rank in self.ranks]
            assert all(len(rank) == request.ahead // self.page for rank in mine)
            self.ahead[1][request.rid] = (request.ahead, mine)
        return [PrecopyAnswer(call.epoch) for _ in self.ranks]

    def _export(self, call: ExportCall) -> list[ExportAnswer]:
        """Hand out all requests, and hold them."""
        assert not self.leaving and not self.coming and not self.early, "a switch begins while requests are handed over"
        if self.held is not None:
            raise CallRefusedError(f"{self.spec}: requests are held already")
        # Each has a token more than a while ago, if it needs no block for it.
        grown = {rid: (kv + (kv % self.page > 0), blocks) for rid, (kv, blocks) in self.running.items()}
        self.held = (call.epoch, grown)
        self.running = {}
        pages = self._held_pages()
        for rank in self.ranks:
            self.lease[rank] -= set(pages[rank])
        given = self._shrink(call.keep)
        told = self.told[1] if self.told[0] == call.epoch else {}
        carried, blocks = [], [[] for _ in self.ranks]
        for rid, (kv, pages_of) in self.held[1].items():
            ahead, first = told.get(rid, (0, [[]]))
            known = (
                rid in told
                and kv > 0
                and all(rank[: len(first[0])] == then for rank, then in zip(pages_of, first, strict=True))
            )
            kind = RequestKind.RUNNING if kv else RequestKind.WAITING
            carried.append(
                CarriedRequest(
                    rid,
                    kind,
                    kv,
                    kv + 1,
                    self.most[rid],
                    None,
                    b"" if known else b"-",
                    delta=b"+" if known else b"",
                    ahead=ahead if known else 0,
                )
            )
            for rank in self.ranks:
                blocks[rank].append(pages_of[rank][len(first[0]) if known else 0 :])
        return [
            ExportAnswer(call.epoch, carried if rank == 0 else [], blocks[rank], pack_ids(pages[rank]), {}, given[rank])
            for rank in self.ranks
        ]

    def _adopt(self, call: AdoptCall) -> list[AdoptAnswer]:
        """Take requests up."""
        for at, request in enumerate(call.requests):
            assert request.rid not in self.running
            mine = [call.blocks[rank][at] for rank in self.ranks]
            if not request.state or request.ahead:
                assert self.ahead[0] == call.epoch
                ahead, first = self.ahead[1].pop(request.rid)
                assert ahead == request.ahead
                mine = [[*rank, *rest] for rank, rest in zip(first, mine, strict=True)]
            assert len(mine[0]) == -(-request.kv_tokens // self.page)
            assert request.most_tokens <= SETTINGS.request_tokens[self.spec.tp]
            self.most[request.rid] = request.most_tokens
            self.running[request.rid] = (request.kv_tokens, mine)
            for rank in self.ranks:
                self._join(rank, mine[rank])
        for rank in self.ranks:
            self._join(rank, unpack_ids(call.grow[rank]).tolist())
        return [AdoptAnswer(call.epoch, [request.rid for request in call.requests], []) for _ in self.ranks]

    def _release(self, call: ReleaseCall) -> list[ReleaseAnswer]:
        """Forget what is held."""
        held = self._require(call.epoch)
        assert set(held) <= set(call.taken) | self.given_up
        aborted = sorted(self.given_up & set(call.taken))
        pages = self._held_pages()
        self.held, self.given_up = None, set()
        given = self._shrink(call.keep)
        return [ReleaseAnswer(call.epoch, pack_ids(pages[rank]), aborted, given[rank]) for rank in self.ranks]

    def _restore(self, call: RestoreCall) -> list[RestoreAnswer]:
        """Go on with what is held."""
        held = self._require(call.epoch)
        pages = self._held_pages()
        for rank in self.ranks:
            self._join(rank, pages[rank])
            self._join(rank, unpack_ids(call.grow[rank]).tolist() if call.grow else [])
        self.running |= held
        self.held = None
        restored = [rid for rid in held if rid not in self.given_up]
        return [RestoreAnswer(call.epoch, restored, pack_ids(pages[rank])) for rank in self.ranks]

    # Blocks.

    def _join(self, rank: int, pages: list[int]) -> None:
        assert not self.lease[rank] & set(pages), "a block that the engine has already"
        self.lease[rank] |= set(pages)

    def _require(self, epoch: int) -> dict[str, tuple[int, list[list[int]]]]:
        if self.held is None or self.held[0] != epoch:
            raise CallRefusedError(f"{self.spec}: nothing of epoch {epoch} is held")
        return self.held[1]

    def _held_pages(self) -> list[list[int]]:
        assert self.held is not None
        return [sorted(page for _, blocks in self.held[1].values() for page in blocks[rank]) for rank in self.ranks]

    def _shrink(self, keep: int | None) -> list[bytes]:
        given = []
        for rank in self.ranks:
            count = max(0, len(self.lease[rank]) - (keep or 0))
            out = sorted(self._free(rank))[:count]
            self.lease[rank] -= set(out)
            given.append(pack_ids(out))
        return given
