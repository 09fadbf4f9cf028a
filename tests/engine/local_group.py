"""A group of real members in real processes, driven without Ray.

Plays the coordinator's part in as few lines as it can: one call per phase, so that a test can
do something between two phases. Every wait is bounded; ``close`` kills what is left, by pid.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from actors.member import Member
from actors.protocol import (
    Broken,
    BuildReport,
    Evicted,
    LoadReport,
    RolledBack,
    StepStats,
    Switched,
    Tokens,
    WorkerEvent,
    WorkerSpec,
)
from actors.sample_kv import KvBySample, SampleKv
from actors.token_detail import DetailSoFar
from actors.weight_chunks import WeightChunk
from placement.experts import initial_owners, plan_group_change
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import FinishReason, Sample

CALL_TIMEOUT_S = 90.0


def _host(spec: WorkerSpec, pipe: Connection) -> None:
    """Main of a worker process: answers each call on a thread of its own."""
    os.setsid()
    member = Member(spec)
    lock = threading.Lock()

    def answer(call_id: int, target: str | Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result: Any = (
                getattr(member, target)(*args) if isinstance(target, str) else target(member, *args)
            )
        except Exception as error:  # noqa: BLE001 - the caller raises it
            result = error
        with lock:
            pipe.send((call_id, result))

    while True:
        try:
            call_id, target, args = pipe.recv()
        except EOFError:
            os._exit(0)
        threading.Thread(target=answer, args=(call_id, target, args), daemon=True).start()


class Worker:
    """A member in its process."""

    def __init__(self, spec: WorkerSpec, context: Any) -> None:
        self.spec = spec
        ours, theirs = context.Pipe()
        self._pipe: Connection = ours
        self.process = context.Process(target=_host, args=(spec, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()
        self.acknowledged = 0

    def _receive(self) -> None:
        try:
            while True:
                call_id, result = self._pipe.recv()
                future = self._calls.pop(call_id)
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except (EOFError, OSError):
            for future in self._calls.values():
                future.set_exception(ConnectionError(f"worker {self.spec.worker_id} is gone"))

    def call(self, target: str | Callable[..., Any], *args: Any) -> "Future[Any]":
        """A method of ``Member`` by name, or an importable function of (member, *args)."""
        future: Future[Any] = Future()
        with self._lock:
            call_id = id(future)
            self._calls[call_id] = future
            try:
                self._pipe.send((call_id, target, args))
            except OSError:
                self._calls.pop(call_id)
                future.set_exception(ConnectionError(f"worker {self.spec.worker_id} is gone"))
        return future

    def do(self, target: str | Callable[..., Any], *args: Any) -> Any:
        return self.call(target, *args).result(CALL_TIMEOUT_S)

    def kill(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(20)


@dataclass
class Response:
    """What has come of one sample."""

    sample: Sample
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    workers: list[WorkerId] = field(default_factory=list)
    weight_versions: tuple[tuple[int, str], ...] = ()
    """From which token on with which weights."""
    detail: DetailSoFar = field(default_factory=DetailSoFar)


class LocalGroup:
    """The members, their experts and the samples of one test."""

    def __init__(
        self,
        model: str,
        size: int,
        *,
        before_build: Callable[[Member], None] | None = None,
        **spec: Any,
    ) -> None:
        self._before_build = before_build
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.engine.preload"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._spec: dict[str, Any] = {
            "store_address": ("127.0.0.1", self._store.port),
            "model": model,
            "engine_args": {"max_model_len": 1024, "dtype": "bfloat16"},
            "kv_memory_bytes": 24 << 20,
            "exact": True,
            "max_samples": 16,
            "max_workers": 4,
            "collective_timeout_s": 15.0,
            **spec,
        }
        self.workers: dict[WorkerId, Worker] = {}
        self.builds: dict[WorkerId, BuildReport] = {}
        self.responses: dict[SampleId, Response] = {}
        self.events: list[tuple[WorkerId, WorkerEvent]] = []
        self.waiting: list[SampleId] = []
        self.copies = False
        """Samples of a leaver move by copying their KV, instead of recomputing it."""
        self.moved_kv: dict[SampleId, SampleKv] = {}
        self.weight_version = "0"
        self.members = tuple(WorkerId(i) for i in range(size))
        self._next_id = size
        self.generation = Generation(1)
        try:
            self._build(self.members, self.members, self.generation, joiner=False)
            self._all(self.members, "start")
        except BaseException:
            self.close()
            raise
        self.owner_E = initial_owners(self.num_experts, self.members)

    @property
    def num_experts(self) -> int:
        return next(iter(self.builds.values())).facts.num_experts

    # ------------------------------------------------------------------------- membership

    def _build(
        self,
        new: tuple[WorkerId, ...],
        members: tuple[WorkerId, ...],
        generation: Generation,
        *,
        joiner: bool,
    ) -> None:
        for w in new:
            spec = WorkerSpec(w, members, generation, joiner, **self._spec)
            self.workers[w] = Worker(spec, self._context)
        if self._before_build is not None:
            self._all(new, self._before_build)
        self.builds |= self._all(new, "build")

    def _all(
        self, workers: tuple[WorkerId, ...], target: str | Callable[..., Any], *args: Any
    ) -> dict[WorkerId, Any]:
        calls = {w: self.workers[w].call(target, *args) for w in workers}
        wait(calls.values(), CALL_TIMEOUT_S)
        errors = {w: e for w, call in calls.items() if call.done() and (e := call.exception())}
        if errors:  # the first cause, not the peers' time-outs that follow from it
            raise min(errors.values(), key=lambda e: "imed out" in str(e))
        return {w: call.result(0) for w, call in calls.items()}

    def plan(self, leave: tuple[int, ...] = (), join: int = 0) -> GroupChange:
        """Build ``join`` joiners and plan the change; nothing else happens yet."""
        joiners = tuple(WorkerId(self._next_id + i) for i in range(join))
        self._next_id += join
        new = tuple(w for w in self.members if w not in leave) + joiners
        self.generation = Generation(self.generation + 1)
        if joiners:
            self._build(joiners, new, self.generation, joiner=True)
        change = plan_group_change(self.generation, self.members, new, self.owner_E)
        return replace(change, weight_version=self.weight_version)

    def prepare(self, change: GroupChange) -> dict[WorkerId, Any]:
        return self._all(change.old_members + change.joiners, "prepare", change)

    def switch(self, change: GroupChange) -> dict[WorkerId, Switched]:
        """Cross over; moved samples go to the survivor with the fewest."""
        self._all(change.old_members + change.joiners, "switch", change.generation)
        crossed = {
            w: self.wait_for(w, Switched, change.generation)
            for w in change.old_members + change.joiners
        }
        self.members, self.owner_E = change.new_members, change.owner_E
        self.place_waiting()
        return crossed

    def finalize(self, change: GroupChange) -> None:
        self._all(change.new_members + change.leavers, "finalize", change.generation)
        for w in change.leavers:
            self.workers[w].do("leave")
            self.retire(w)

    def change(self, leave: tuple[int, ...] = (), join: int = 0) -> dict[WorkerId, Switched]:
        """The whole routine."""
        change = self.plan(leave, join)
        self.prepare(change)
        crossed = self.switch(change)
        self.finalize(change)
        return crossed

    def retire(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id).kill()

    # ----------------------------------------------------------------------------- weights

    def load_weights(
        self, version: str, chunks: list[WeightChunk], *, unhold: bool = True
    ) -> dict[WorkerId, LoadReport]:
        """What the coordinator does: hold all, load on all, let them decode on."""
        self.all_members("hold")
        reports: dict[WorkerId, LoadReport] = self.all_members("load_weights", version, chunks)
        self.weight_version = version
        if unhold:
            self.all_members("unhold")
        return reports

    def all_members(self, target: str | Callable[..., Any], *args: Any) -> dict[WorkerId, Any]:
        """Call the same on every member."""
        return self._all(self.members, target, *args)

    # ----------------------------------------------------------------------------- samples

    def submit(self, worker: int, *samples: Sample, kv: KvBySample | None = None) -> None:
        for sample in samples:
            begun = Response(sample, list(sample.generated_ids))
            self.responses.setdefault(sample.sample_id, begun)
            self.responses[sample.sample_id].workers.append(WorkerId(worker))
        self.workers[WorkerId(worker)].do("submit", list(samples), kv)

    def place_waiting(self) -> None:
        """Give samples that a leaver let go to the members with the fewest."""
        for sample_id in self.waiting:
            response = self.responses[sample_id]
            load = dict.fromkeys(self.members, 0)
            for other in self.responses.values():
                if other.finish is None and other.workers[-1] in load:
                    load[other.workers[-1]] += 1
            worker = min(self.members, key=lambda w: (load[w], w))
            kv = {}
            if self.copies:
                kv = self.workers[response.workers[-1]].do("fetch_kv", [sample_id])
                self.moved_kv |= kv
            self.submit(worker, response.sample.continued(tuple(response.token_ids)), kv=kv)
        self.waiting.clear()

    def move(self, sample_id: SampleId, destination: WorkerId) -> int:
        """From one member to another, both of which decode on; returns the bytes of KV that went
        with it."""
        response = self.responses[sample_id]
        source = self.workers[response.workers[-1]]
        source.do("cancel", [sample_id], self.copies)
        self.wait_until(lambda: sample_id in self.waiting)
        self.waiting.remove(sample_id)
        kv = source.do("fetch_kv", [sample_id]) if self.copies else {}
        assert source.do("fetch_kv", [sample_id]) == {}, "it can be fetched once"
        self.submit(destination, response.sample.continued(tuple(response.token_ids)), kv=kv)
        return sum(one.num_bytes for one in kv.values())

    def stats(self, worker_id: WorkerId) -> StepStats:
        stats: StepStats = self.workers[worker_id].do("collect", 0, 0.0).stats
        return stats

    def collect(self, worker_id: WorkerId, wait_s: float = 0.0) -> None:
        worker = self.workers[worker_id]
        report = worker.do("collect", worker.acknowledged, wait_s)
        worker.acknowledged = report.cursor
        for event in report.events:
            self.events.append((worker_id, event))
            if isinstance(event, Tokens):
                response = self.responses[event.sample_id]
                assert event.start == len(response.token_ids)
                response.token_ids += event.token_ids
                response.logprobs += event.logprobs
                spans = response.weight_versions
                if event.token_ids and (not spans or spans[-1][1] != event.weight_version):
                    response.weight_versions += ((event.start, event.weight_version),)
                if event.detail is not None:
                    response.detail.add(event.detail)
                response.finish, response.error = event.finish_reason, event.error
            elif isinstance(event, Evicted):
                self.waiting.append(event.sample_id)

    def wait_until(self, condition: Callable[[], bool], *, rounds: int = 600) -> None:
        """Collect from all members until ``condition`` holds; bounded."""
        for _ in range(rounds):
            for w in list(self.workers):
                self.collect(w)
            if condition():
                return
            if broken := [e for _, e in self.events if isinstance(e, Broken)]:
                raise ConnectionError(broken[0].error)
            self.collect(self.members[0], wait_s=0.2)
        raise TimeoutError(f"after {rounds} rounds: {self.events[-5:]}")

    def wait_for(self, worker_id: WorkerId, kind: type, generation: Generation) -> Any:
        def seen() -> list[Any]:
            return [
                e
                for w, e in self.events
                if w == worker_id and isinstance(e, kind) and e.generation == generation
            ]

        self.wait_until(lambda: bool(seen()))
        return seen()[-1]

    def wait_for_rollback(self, worker_id: WorkerId, generation: Generation) -> RolledBack:
        rolled_back: RolledBack = self.wait_for(worker_id, RolledBack, generation)
        return rolled_back

    def wait_for_tokens(self, sample_id: SampleId, count: int) -> None:
        self.wait_until(lambda: len(self.responses[sample_id].token_ids) >= count)

    def finish_all(self) -> dict[SampleId, Response]:
        """Decode until every sample has ended; the responses so far, cleared."""
        self.wait_until(lambda: all(r.finish is not None for r in self.responses.values()))
        done, self.responses = self.responses, {}
        return done

    def cancel_all(self) -> None:
        """Let go of every sample, so that the next test finds an idle group."""
        for w in self.members:
            self.workers[w].do("cancel", list(self.responses))
        self.wait_until(
            lambda: all(
                self.workers[w].do("collect", self.workers[w].acknowledged, 0.0).stats.running == 0
                for w in self.members
            )
        )
        for w in self.members:
            self.collect(w)  # the last tokens before they were let go
        self.responses.clear()
        self.waiting.clear()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
