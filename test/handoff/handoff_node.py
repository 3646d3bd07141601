"""Engines of several TP sizes on one pool, in a process forked from one that has loaded sglang. It stands for the
front (sends requests, collects tokens) and for the router (moves leases, copies KV, drives switches)."""

from __future__ import annotations

import json
import multiprocessing
import traceback
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from handoff_rank import RankCase, run_rank

from sglang_adapt.core import handoff as messages
from sglang_adapt.core.block_ids import unpack_ids
from sglang_adapt.kv.blocks import BlockLedger, BlockState
from sglang_adapt.kv.copiers import CpuCopier
from sglang_adapt.kv.copy import DirectExecutor
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.leases import EngineRanks, Leases
from sglang_adapt.kv.ledger_format import ledger_bytes
from sglang_adapt.kv.plan import CopyBatch, RequestCopy
from sglang_adapt.kv.plan_build import build_plans

_LIMIT_MS = 60_000
_OTHERS = 99  # an engine that is not there, so that the ranks of an engine have different pages


@dataclass
class Stream:
    """What a client has been sent of one request."""

    ids: list[int] = field(default_factory=list)
    decode_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    finished: Any = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Asked:
    """A request: prompt, sampling parameters, what logprobs."""

    ids: list[int]
    params: dict[str, Any]
    logprobs_from: int | None = None
    top: int = 0


class Engine:
    """One engine: its ranks' processes and its sockets."""

    def __init__(self, ranks: EngineRanks, node: Node, pages: list[list[int]]) -> None:
        from sglang.srt.server_args import PortArgs, ServerArgs

        from sglang_adapt.upstream.kv_pool import pool_server_args

        self.ranks = ranks
        args = ServerArgs(**node.args, tp_size=ranks.tp, **pool_server_args(node.geometry, ranks.tp))
        ports = PortArgs.init_new(args)
        self.outputs, self.control = node.zmq.socket(zmq.PULL), node.zmq.socket(zmq.PULL)
        self.outputs.bind(ports.detokenizer_ipc_name)
        # As in the server: one socket for all of an engine's messages. Aborts come here.
        ports.tokenizer_ipc_name = ports.detokenizer_ipc_name
        self.inputs, rpc = node.zmq.socket(zmq.PUSH), node.zmq.socket(zmq.DEALER)
        self.inputs.bind(ports.scheduler_input_ipc_name)
        rpc.bind(ports.rpc_ipc_name)
        self.rpc = rpc
        context = multiprocessing.get_context("fork")
        self.answers, self.ready, self.processes = [], [], []
        for rank, gpu in enumerate(ranks.gpus):
            answers, ready = context.Pipe(duplex=False), context.Pipe(duplex=False)
            case = RankCase(ranks.name, node.geometry, ranks.tp, node.regions[gpu], pages[rank])
            placed = (args, ports, gpu, rank, 0, 0, 0, 0, None)
            process = context.Process(target=run_rank, args=(case, answers[1], ready[1], *placed), daemon=True)
            process.start()
            answers[1].close()
            ready[1].close()
            self.answers.append(answers[0])
            self.ready.append(ready[0])
            self.processes.append(process)

    def wait_ready(self) -> None:
        for ready in self.ready:
            ready.recv()

    def post(self, name: str, message: str = "") -> None:
        from sglang.srt.managers.io_struct import RpcReqInput, sock_send

        sock_send(self.inputs, RpcReqInput(method="adapt_call", parameters={"name": name, "message": message}))

    def collect(self) -> list[Any]:
        """The answers of all ranks to what was posted; raises what any of them said."""
        results = []
        for answers in self.answers:
            if not answers.poll(_LIMIT_MS / 1000):
                raise TimeoutError(f"{self.ranks.name} does not answer")
            results.append(answers.recv())
        failed = [text for success, text in results if not success]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result for _, result in results]

    def call(self, name: str, message: str = "") -> list[Any]:
        self.post(name, message)
        return self.collect()

    def handoff(self, call: messages.HandoffCall) -> None:
        self.post("handoff", b64encode(messages.encode(call)).decode())

    def handed(self, kind: type[messages.Answer]) -> list[messages.Answer]:
        return [messages.decode_answer(answer, kind) for answer in self.collect()]


class Node:
    """GPUs with a region and a ledger each, and engines on them."""

    def __init__(self, geometry: PoolGeometry, engines: Sequence[EngineRanks], args: dict[str, Any]) -> None:
        import torch

        self.geometry, self.args, self.zmq = geometry, args, zmq.Context()
        gpus = sorted({gpu for ranks in engines for gpu in ranks.gpus})
        self.regions = {gpu: torch.zeros(geometry.region_shape).share_memory_() for gpu in gpus}
        self.ledgers = {gpu: BlockLedger(bytearray(ledger_bytes(geometry)), geometry, gpu, "test") for gpu in gpus}
        self.leases = Leases(self.ledgers)
        for gpu in gpus:
            self.ledgers[gpu].take(3 + 5 * gpu, _OTHERS, BlockState.LEASED, 0)
        self.epoch = 0
        self.streams: dict[str, Stream] = {}
        self.fences: set[str] = set()
        self.kinds: dict[str, str] = {}
        self.engines = {ranks.name: Engine(ranks, self, [[] for _ in ranks.gpus]) for ranks in engines}
        for engine in self.engines.values():
            engine.wait_ready()
        self.poller = zmq.Poller()
        for engine in self.engines.values():
            self.poller.register(engine.outputs, zmq.POLLIN)
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        self.tokenizer = get_tokenizer(args["model_path"])

    # -- as the front

    def send(self, engine: str, rid: str, asked: Asked) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, sock_send
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **asked.params})
        params.normalize(self.tokenizer)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", asked.ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=asked.logprobs_from is not None,
            logprob_start_len=-1 if asked.logprobs_from is None else asked.logprobs_from,
            top_logprobs_num=asked.top,
            token_ids_logprob=None,
            stream=True,
        )
        request.wrap_pickle_fields()
        self.streams[rid] = Stream()
        sock_send(self.engines[engine].inputs, request)

    def abort(self, engine: str, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq, sock_send

        sock_send(self.engines[engine].inputs, AbortReq(rid=rid))

    def pump(self, until: Callable[[], bool]) -> None:
        """Collect outputs until a condition holds."""
        from sglang.srt.managers.io_struct import sock_recv

        names = {engine.outputs: name for name, engine in self.engines.items()}
        while not until():
            ready = self.poller.poll(_LIMIT_MS)
            if not ready:
                missing = {rid: len(stream.ids) for rid, stream in self.streams.items() if stream.finished is None}
                raise TimeoutError(f"no output comes; unfinished: {missing}")
            for socket, _ in ready:
                self._take(sock_recv(socket), names[socket])

    def pump_tokens(self, rids: Sequence[str], count: int) -> None:
        self.pump(lambda: all(len(self.streams[rid].ids) >= count or self.streams[rid].finished for rid in rids))

    def finish(self) -> dict[str, Stream]:
        """Wait until all requests have ended; returns and forgets their streams."""
        self.pump(lambda: all(stream.finished is not None for stream in self.streams.values()))
        done, self.streams = self.streams, {}
        return done

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def _take(self, message: Any, engine: str) -> None:
        kind = type(message).__name__
        if kind == "RpcReqOutput":
            self.fences.add(engine)
        elif kind == "AbortReq":
            self._end(message.rid, {"type": "abort"})
        elif kind == "BatchTokenIDOutput":
            for index, rid in enumerate(message.rids):
                stream = self.streams[rid]
                assert stream.finished is None, f"{rid} goes on after its end"
                stream.ids += list(message.output_ids[index]) if message.output_ids else []
                stream.decode_ids += list(message.decode_ids[index])
                stream.cached_tokens = message.cached_tokens[index]
                for target, values in (
                    (stream.logprobs, message.output_token_logprobs_val),
                    (stream.input_logprobs, message.input_token_logprobs_val),
                    (stream.top, message.output_top_logprobs_idx),
                ):
                    target += (values[index] or []) if values else []
                if message.finished_reasons[index] is not None:
                    self._end(rid, message.finished_reasons[index])

    def _end(self, rid: str, reason: Any) -> None:
        assert self.streams[rid].finished is None, f"{rid} ends twice"
        self.streams[rid].finished = reason

    # -- as the router

    def lease_all(self, names: Sequence[str], count: int | None = None) -> None:
        """Give the engines all free blocks of their GPUs, or `count` of them."""
        for name in names:
            engine = self.engines[name]
            pages = self.leases.grow(
                engine.ranks, self.leases.free(engine.ranks) if count is None else count, self.epoch
            )
            engine.call("grow", json.dumps(pages.tolist()))

    def take_back(self, names: Sequence[str], count: int | None = None) -> None:
        """Take back what no request of the engines holds, or `count` blocks of it."""
        for name in names:
            engine = self.engines[name]
            self.leases.shrink(engine.ranks, engine.call("give_back", "" if count is None else str(count)), self.epoch)

    def export(self, sources: Sequence[str]) -> dict[str, list[messages.ExportAnswer]]:
        """Export from all at once; returns when their last outputs have been seen."""
        self.epoch += 1
        self.fences.clear()
        for name in sources:
            self.engines[name].handoff(messages.ExportCall(self.epoch))
        answers = {name: self.engines[name].handed(messages.ExportAnswer) for name in sources}
        self.pump(lambda: self.fences >= set(sources))
        for name, ranks in answers.items():
            self.leases.export(self.engines[name].ranks, [unpack_ids(answer.exported) for answer in ranks], self.epoch)
            self.kinds |= {request.rid: request.kind for request in ranks[0].requests}
        return answers

    def place(
        self, exported: dict[str, list[messages.ExportAnswer]], dest: str, wanted: set[str]
    ) -> messages.AdoptCall:
        """Reserve blocks on `dest` for the wanted requests and copy their KV there."""
        engine = self.engines[dest].ranks
        chosen = [
            (name, index, request)
            for name, ranks in exported.items()
            for index, request in enumerate(ranks[0].requests)
            if request.rid in wanted
        ]
        counts = [self.geometry.blocks_for(request.kv_tokens, engine.tp) for _, _, request in chosen]
        reserved = self.leases.reserve(engine, sum(counts), self.epoch)
        parts = np.split(reserved, np.cumsum(counts)[:-1], axis=1) if chosen else []
        batches = []
        for name, ranks in exported.items():
            copies = tuple(
                RequestCopy(
                    request.rid,
                    request.kv_tokens,
                    np.array([answer.blocks[index] for answer in ranks], dtype=np.int32),
                    part,
                )
                for (source, index, request), part in zip(chosen, parts, strict=True)
                if source == name and request.kv_tokens
            )
            batches.append(CopyBatch(self.engines[name].ranks.gpus, engine.gpus, copies))
        ticket = self.leases.begin_copy(batches, self.epoch)
        for plan in build_plans(self.geometry, batches):
            DirectExecutor.on(self.geometry, plan.gpu, self.regions, CpuCopier()).start(plan).wait()
        self.leases.end_copy(ticket, self.epoch)
        blocks = [[part[rank].tolist() for part in parts] for rank in range(engine.tp)]
        return messages.AdoptCall(self.epoch, [request for _, _, request in chosen], blocks)

    def adopt(self, dest: str, call: messages.AdoptCall) -> list[messages.AdoptAnswer]:
        self.engines[dest].handoff(call)
        answers = self.engines[dest].handed(messages.AdoptAnswer)
        adopted = [
            [
                page
                for rid, pages in zip(call.requests, row, strict=True)
                if rid.rid not in call.aborted
                for page in pages
            ]
            for row in call.blocks
        ]
        self.leases.adopt(self.engines[dest].ranks, adopted, self.epoch)
        gone = [
            [page for rid, pages in zip(call.requests, row, strict=True) if rid.rid in call.aborted for page in pages]
            for row in call.blocks
        ]
        self.leases.cancel(self.engines[dest].ranks, gone, self.epoch)
        return answers

    def cancel(self, dest: str, call: messages.AdoptCall) -> None:
        """Give up the blocks of an adopt that did not happen."""
        rows = [[page for pages in row for page in pages] for row in call.blocks]
        self.leases.cancel(self.engines[dest].ranks, rows, self.epoch)

    def release(self, source: str, taken: Sequence[str]) -> list[messages.ReleaseAnswer]:
        self.engines[source].handoff(messages.ReleaseCall(self.epoch, list(taken)))
        answers = self.engines[source].handed(messages.ReleaseAnswer)
        self.leases.release(self.engines[source].ranks, [unpack_ids(answer.freed) for answer in answers], self.epoch)
        return answers

    def restore(self, source: str) -> list[messages.RestoreAnswer]:
        self.engines[source].handoff(messages.RestoreCall(self.epoch))
        answers = self.engines[source].handed(messages.RestoreAnswer)
        self.leases.restore(self.engines[source].ranks, [unpack_ids(answer.leased) for answer in answers], self.epoch)
        return answers

    def switch(
        self, sources: Sequence[str], dests: Sequence[str], home: Callable[[str], str] | None = None
    ) -> list[str]:
        """Move all requests and all blocks; returns the ids of spilled requests."""
        exported = self.export(sources)
        self.take_back(sources)
        spilled: list[str] = []
        taken: list[str] = []
        rids = [request.rid for ranks in exported.values() for request in ranks[0].requests]
        homes = {rid: home(rid) if home else dests[index % len(dests)] for index, rid in enumerate(rids)}
        calls = {dest: self.place(exported, dest, {rid for rid, to in homes.items() if to == dest}) for dest in dests}
        self.lease_all(dests)  # before they run: an engine that finds no block for the next token aborts requests
        for dest, call in calls.items():
            answers = self.adopt(dest, call)
            spilled += answers[0].spilled
            taken += answers[0].adopted
        for name in sources:
            self.release(name, [rid for rid in taken if rid in {req.rid for req in exported[name][0].requests}])
        self.take_back(sources)
        self.lease_all(dests)
        return spilled

    def check_idle(self) -> None:
        """No engine has requests; ledgers add up and say what the engines' ranks have."""
        self.leases.check([engine.ranks for engine in self.engines.values()])
        for engine in self.engines.values():
            states = engine.call("idle_state")
            assert [state.leased for state in states] == self.leases.lease(engine.ranks).tolist()
        for ledger in self.ledgers.values():
            assert not ledger.count(BlockState.EXPORTED)
            assert not ledger.count(BlockState.RESERVED)


class NodeProcess:
    """A node in a process of its own; `call` runs a function of a module on it."""

    def __init__(self, context: Any, *args: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(node, *args)` there; what it raises is raised here as AssertionError with its text."""
        self.pipe.send((function, args))
        if not self.pipe.poll(200):
            raise TimeoutError(f"{function.__name__} does not end")
        success, value = self.pipe.recv()
        assert success, value
        return value

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, *args: Any) -> None:
    import os
    import signal

    from sglang_adapt.core.process import die_with_parent
    from sglang_adapt.upstream.rank import prepare_process

    die_with_parent(signal.SIGKILL)
    prepare_process()
    os.setsid()
    try:
        node: Node | None = None
        while True:
            function, arguments = pipe.recv()
            try:
                node = node or Node(*args)
                pipe.send((True, function(node, *arguments)))
            except Exception:  # noqa: BLE001 -- it is told, and raised there
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        os.killpg(0, signal.SIGKILL)
