"""The process of one GPU: owns its region, maps the others', and runs the sections of the benchmark in step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from threading import Barrier, Thread
from typing import Any

import torch

from kv_bench.baselines import BigCopy, per_page_ms, plain_copies
from kv_bench.cases import Case, Scale
from kv_bench.clock import Clock, CudaClock
from kv_bench.content import count_wrong, fill, residents
from sglang_adapt.kv.copiers import CpuCopier, TritonCopier, UnitCopier
from sglang_adapt.kv.copy import DirectExecutor, PreparedCopy
from sglang_adapt.kv.geometry import PoolGeometry
from sglang_adapt.kv.lanes import Lane
from sglang_adapt.kv.plan import CopyBatch, SourcePlan
from sglang_adapt.kv.plan_build import build_plans
from sglang_adapt.kv.staged import StagedReceiver, StagedSender
from sglang_adapt.kv.transfer import pin, push
from sglang_adapt.memory import Region, allocate, attach

SECTIONS = ("limit", "copy", "pull", "big_copy", "per_page", "staged", "staged_host", "programs", "beside")
_PROGRAMS = (8, 16, 32, 64, 132, 264, 528, 1056)


@dataclass(frozen=True)
class Links:
    """What a worker gets from the main process: a pipe to it, a barrier for the start and one for each section,
    and a channel to and from the peer."""

    main: Connection
    barriers: dict[str, Any]
    to_peer: Connection
    from_peer: Connection


def work(gpu: int, scale: Scale, kind: str, links: Links) -> None:
    """Run all sections. Results go to the main process as (gpu, section, key, values)."""
    worker = Worker(gpu, scale, kind, links)
    for number, section in enumerate(SECTIONS):
        barrier = links.barriers[section]
        worker.begin(number, barrier)
        try:
            barrier.wait(60)
            getattr(worker, section)()
            barrier.wait(60)
        except RuntimeError:  # also a broken barrier, a CUDA error, and a copy error
            barrier.abort()
            links.main.send((gpu, "error", section, {"text": traceback.format_exc(limit=-3)}))
    links.main.send((gpu, "done", None, {}))
    links.main.recv()  # keep the memory mapped until all are done


class Worker:
    def __init__(self, gpu: int, scale: Scale, kind: str, links: Links) -> None:
        self.gpu, self.scale, self.links = gpu, scale, links
        self.cuda = kind == "cuda"
        self.device = torch.device("cuda", gpu) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.lane = Lane(self.device)
        inbox_bytes = max(scale.bytes_per_gpu) * 11 // 10 + 4 * scale.staging_bytes
        own = {
            "region": allocate(scale.region_bytes, self.device),
            "inbox": allocate(inbox_bytes, self.device),
            "counters": allocate(4096, self.device),
            "host": allocate(2 * scale.staging_bytes, "cpu"),
        }
        self.outbox = torch.zeros(inbox_bytes, dtype=torch.uint8, device=self.device)
        links.main.send((gpu, "handles", None, {name: region.handle for name, region in own.items()}))
        handles = links.main.recv()
        begin = time.perf_counter()
        self._mapped: list[Region] = list(own.values())
        self.maps: dict[str, dict[int, torch.Tensor]] = {name: {} for name in own}
        for peer, named in handles.items():
            for name, handle in named.items():
                region = own[name] if peer == gpu else attach(handle, "write", self.device if self.cuda else None)
                self._mapped.append(region)
                self.maps[name][peer] = region.tensor
        map_ms = (time.perf_counter() - begin) * 1e3
        first = links.barriers["start"]
        self.clock: Clock = (
            CudaClock(first, self.lane, self.maps["counters"][0].view(torch.int32), scale.gpus)
            if self.cuda
            else Clock(first)
        )
        self.report("start", "maps", map_ms=map_ms, card=self._card())
        first.wait(120)

    def begin(self, number: int, barrier: Barrier) -> None:
        if isinstance(self.clock, CudaClock):
            self.clock.section(number, barrier)
        else:
            self.clock = Clock(barrier)

    def report(self, section: str, key: Any, **values: Any) -> None:
        self.links.main.send((self.gpu, section, key, values))

    # -- sections, in the order of SECTIONS

    def limit(self) -> None:
        """A plain copy to the next GPU: by GPU 0 alone, then by all GPUs at once."""
        size, after = self.scale.limit_bytes, (self.gpu + 1) % self.scale.gpus
        own = self.maps["region"][self.gpu][:size]
        there = self.maps["region"][after][size : 2 * size]
        alone, together = plain_copies(self.clock, own, [there if self.gpu == 0 else None, there], self.scale.reps)
        if self.gpu == 0:
            self.report("limit", "one_way", ms=alone, bytes=size)
        self.report("limit", "all", ms=together, bytes=size)

    def copy(self) -> None:
        """One launch per GPU: every direction, page size and amount; every one checked word by word."""
        for source_tp, dest_tp in self.scale.directions:
            for page in self.scale.page_tokens:
                for size in self.scale.bytes_per_gpu:
                    case = Case(source_tp, dest_tp, page, size)
                    run = self.load(case)
                    executor = self.executor(run, self.copier())
                    prepared = executor.prepare(run.plan)
                    ms = self.clock.measure(partial(executor.launch, prepared), self.scale.reps)
                    wall = self.clock.wall(partial(_whole, executor, run.plan), 3)
                    self.clock.together()
                    wrong = run.count_wrong()
                    times = {"ms": ms, "wall_ms": wall, "plan_ms": run.plan_ms}
                    self.report("copy", case, **times, wrong=wrong, **self.traffic(run))

    def pull(self) -> None:
        """Each GPU reads what it gets from the others' memory, as engines do in a switch; smallest pages."""
        for source_tp, dest_tp in self.scale.directions:
            for size in self.scale.bytes_per_gpu:
                case = Case(source_tp, dest_tp, self.scale.page_tokens[0], size)
                run = self.load(case)
                parts = {gpu: plan.to_gpu(self.gpu) for gpu, plan in run.plans.items() if self.gpu in plan.dest_gpus}
                lanes = {gpu: self.lane if gpu == self.gpu else Lane(self.device) for gpu in parts}
                executors = {
                    gpu: DirectExecutor(run.geometry, gpu, run.regions, self.copier(), lanes[gpu]) for gpu in parts
                }
                prepared = {gpu: executors[gpu].prepare(part) for gpu, part in parts.items()}
                ms = self.clock.measure(partial(_pull, executors, prepared, self.lane), self.scale.reps)
                self.clock.together()
                self.report("pull", case, ms=ms, wrong=run.count_wrong(), **self.traffic(run))

    def big_copy(self) -> None:
        """Gather, one big copy for each peer, scatter."""
        for size in self.scale.bytes_per_gpu:
            case = self.case(size)
            run = self.load(case)
            baseline = BigCopy(
                self.executor(run, self.copier()), run.plans, self.outbox, self.maps["inbox"], self.clock
            )
            ms = self.clock.measure(baseline.run, self.scale.reps)
            self.clock.together()
            self.report("big_copy", case, ms=ms, wrong=run.count_wrong(), **self.traffic(run))

    def per_page(self) -> None:
        """One asynchronous copy for each page and plane, extrapolated from about two thousand."""
        if not self.cuda:
            return
        for page in (self.scale.page_tokens[0], self.scale.page_tokens[-1]):
            case = Case(*self.scale.directions[0], page, self.scale.bytes_per_gpu[-1])
            run = self.load(case)
            self.clock.together()
            ms, calls = per_page_ms(run.geometry, run.plan, run.regions, 2048)
            self.report("per_page", case, ms=ms, calls=calls, **self.traffic(run))

    def staged(self) -> None:
        """Double-buffered through the peer's memory, with the copy engine; timed on the host."""
        self._staged("staged", self.scale.bytes_per_gpu, through_host=False)

    def staged_host(self) -> None:
        """Double-buffered through pinned host memory, as without peer access; timed on the host."""
        if self.cuda and self.scale.gpus == 2:
            for buffers in self.maps["host"].values():
                pin(buffers)
        self._staged("staged_host", self.scale.bytes_per_gpu[:3:2], through_host=True)

    def programs(self) -> None:
        """The same copy with smaller grids."""
        case = self.case(self.scale.bytes_per_gpu[min(2, len(self.scale.bytes_per_gpu) - 1)])
        run = self.load(case)
        for programs in _PROGRAMS if self.cuda else ():
            executor = self.executor(run, TritonCopier(programs))
            prepared = executor.prepare(run.plan)
            ms = self.clock.measure(partial(executor.launch, prepared), 3)
            self.report("programs", programs, ms=ms, **self.traffic(run))

    def beside(self) -> None:
        """Copies of several kinds beside decode-like work on every GPU."""
        if not self.cuda or self.scale.gpus != 2:
            return
        from kv_bench.beside import DecodeLoad, slowdown

        load = DecodeLoad(self.device)
        run = self.load(self.case(self.scale.bytes_per_gpu[0]))
        peer = 1 - self.gpu
        size = run.bytes_from_to(self.gpu, peer)
        engine = Lane(self.device)

        def by_engine() -> None:
            with engine.use():
                push(self.maps["inbox"][peer][:size], self.outbox[:size])
            engine.mark().wait()

        kinds: list[tuple[str, Callable[[], None]]] = []
        for name, programs in (("whole GPU", None), ("64 programs", 64), ("32 programs", 32), ("16 programs", 16)):
            executor = DirectExecutor(run.geometry, self.gpu, run.regions, TritonCopier(programs), Lane(self.device))
            prepared = executor.prepare(run.plan)
            kinds.append((name, partial(_whole, executor, prepared)))
        kinds.append(("copy engine", by_engine))
        for name, copy in kinds:
            copy()
            self.clock.together()
            alone_ms = load.alone_ms()
            self.clock.together()
            factor, ms = slowdown(load, copy, alone_ms)
            self.clock.together()
            self.report("beside", name, slowdown=factor, ms=ms, **self.traffic(run))

    # -- what sections share

    def case(self, size: int) -> Case:
        """The case that baselines are compared in: the first direction from TP 1 to all GPUs, smallest
        pages."""
        widest = max(dest for source, dest in self.scale.directions if source == 1)
        return Case(1, widest, self.scale.page_tokens[0], size)

    def copier(self) -> UnitCopier:
        return TritonCopier() if self.cuda else CpuCopier()

    def load(self, case: Case) -> Run:
        """Plan a case and fill this GPU's region with its sources; all GPUs are ready on return."""
        geometry = self.scale.geometry(case.page_tokens)
        batches = case.batches(self.scale)
        begin = time.perf_counter()
        plans = {plan.gpu: plan for plan in build_plans(geometry, batches)}
        plan_ms = (time.perf_counter() - begin) * 1e3
        regions = {
            gpu: memory[: geometry.region_bytes].view(torch.int16).view(geometry.region_shape)
            for gpu, memory in self.maps["region"].items()
        }
        run = Run(self.gpu, self.device, geometry, batches, plans, regions, plan_ms)
        self.clock.together()
        fill(regions[self.gpu], geometry, residents(geometry, batches, self.gpu, "source", self.device))
        self.clock.finish()
        self.clock.together()
        return run

    def executor(self, run: Run, copier: UnitCopier) -> DirectExecutor:
        return DirectExecutor(run.geometry, self.gpu, run.regions, copier, self.lane)

    def traffic(self, run: Run) -> dict[str, int]:
        """Bytes that this GPU sends to and gets from others, and moves within itself."""
        sent = {gpu: run.bytes_from_to(self.gpu, gpu) for gpu in run.regions}
        got = [run.bytes_from_to(gpu, self.gpu) for gpu in run.regions if gpu != self.gpu]
        return {"local": sent.pop(self.gpu), "out": sum(sent.values()), "in": sum(got)}

    def _staged(self, section: str, sizes: tuple[int, ...], *, through_host: bool) -> None:
        if self.scale.gpus != 2:
            return
        peer = 1 - self.gpu
        for size in sizes:
            case = self.case(size)
            run = self.load(case)
            ms = self.clock.wall(partial(self._exchange, run, self._ends(run, peer, through_host)), 3)
            self.clock.together()
            self.report(section, case, ms=ms, wrong=run.count_wrong(), **self.traffic(run))

    def _exchange(self, run: Run, ends: tuple[StagedSender, StagedReceiver]) -> None:
        """Send to the peer, receive from it, and copy what stays, all at once."""
        sender, receiver = ends
        failed: list[RuntimeError] = []

        def send() -> None:
            if self.cuda:
                torch.cuda.set_device(self.device)
            try:
                sender.run(run.plan.to_gpu(receiver_gpu))
            except RuntimeError as error:
                failed.append(error)

        receiver_gpu = 1 - self.gpu
        thread = Thread(target=send)
        thread.start()
        self.executor(run, self.copier()).start(run.plan.to_gpu(self.gpu))
        receiver.run(run.plans[receiver_gpu].to_gpu(self.gpu))
        thread.join()
        if failed:
            raise failed[0]

    def _ends(self, run: Run, peer: int, through_host: bool) -> tuple[StagedSender, StagedReceiver]:
        size = self.scale.staging_bytes

        def two(memory: torch.Tensor) -> list[torch.Tensor]:
            return [memory[:size], memory[size : 2 * size]]

        link = self.maps["host"][self.gpu] if through_host else self.maps["inbox"][peer]
        from_link = self.maps["host"][peer] if through_host else self.maps["inbox"][self.gpu]
        own, region = self.outbox, run.regions[self.gpu]
        sender = StagedSender(
            run.geometry, self.gpu, region, two(own), two(link), self.copier(), self.links.to_peer, 20
        )
        receiver = StagedReceiver(
            run.geometry,
            self.gpu,
            region,
            two(from_link),
            two(own[2 * size :]) if through_host else None,
            self.copier(),
            self.links.from_peer,
            20,
        )
        return sender, receiver

    def _card(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.cuda else "cpu"


def _whole(executor: DirectExecutor, copy: SourcePlan | PreparedCopy) -> None:
    """A copy from its plan, or prepared before, until it has ended."""
    mark = executor.launch(copy) if isinstance(copy, PreparedCopy) else executor.start(copy)
    mark.wait()


def _pull(executors: Mapping[int, DirectExecutor], prepared: Mapping[int, PreparedCopy], lane: Lane) -> None:
    """Copies from all sources side by side, and `lane` behind them."""
    with lane.use():
        marks = [executors[gpu].launch(copy) for gpu, copy in prepared.items()]
    for mark in marks:
        lane.after(mark)


@dataclass(frozen=True)
class Run:
    """A case with its plans, on one GPU."""

    gpu: int
    device: torch.device
    geometry: PoolGeometry
    batches: tuple[CopyBatch, ...]
    plans: dict[int, SourcePlan]
    regions: dict[int, torch.Tensor]
    plan_ms: float

    @property
    def plan(self) -> SourcePlan:
        return self.plans[self.gpu]

    def bytes_from_to(self, source: int, dest: int) -> int:
        return self.plans[source].plane_bytes_to().get(dest, 0) * self.geometry.planes

    def count_wrong(self) -> int:
        """Words of this GPU's region that are not what they must be after the copy; sources are unchanged."""
        held = [
            resident
            for end in ("source", "dest")
            for resident in residents(self.geometry, self.batches, self.gpu, end, self.device)
        ]
        return count_wrong(self.regions[self.gpu], self.geometry, held)
