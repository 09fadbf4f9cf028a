"""Fakes of everything that the coordinator needs from outside: a cluster with slots, worker
processes that decode in lockstep, and a store.

The fakes keep the ports' promises and check the coordinator's: a lease may only be released
when its process has gone, samples must fit into the KV that there is, an expert has one owner.
Tokens depend on nothing but the sample's seed and the position.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from actors.ports import GroupRecord, Lease
from actors.protocol import (
    Broken,
    BuildReport,
    Evicted,
    FinalizeReport,
    LoadReport,
    ModelFacts,
    PrepareReport,
    RolledBack,
    StepStats,
    Switched,
    Tokens,
    WorkerEvent,
    WorkerReport,
    WorkerSpec,
)
from actors.sample_kv import FetchedKv
from placement.errors import FlexFloorError, UnavailableError, WorkerLostError
from placement.experts import check_ownership, initial_owners
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import FinishReason, Sample

STEP_S = 0.05
BUILD_S = 5.0
LOAD_S = 0.4
HOLD_S = 0.02
VOCAB = 100
MAX_MODEL_LEN = 200
NUM_EXPERTS = 16
KV_BLOCK_TOKENS = 16
KV_BLOCK_BYTES = 1024
EXPERT_BYTES = 8 * KV_BLOCK_BYTES
FACTS = ModelFacts(
    num_layers=2,
    num_experts=NUM_EXPERTS,
    vocab_size=VOCAB,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=(1,),
    expert_bytes=EXPERT_BYTES,
    kv_block_bytes=KV_BLOCK_BYTES,
    kv_block_tokens=KV_BLOCK_TOKENS,
    dense_bytes=1 << 20,
)


def expected_token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7919) % VOCAB


def expected_response(sample_seed: int, num_prompt: int, length: int) -> tuple[int, ...]:
    return tuple(expected_token(sample_seed, num_prompt + i) for i in range(length))


class FakeLeases:
    """``slots``: per node, how many workers it can hold; ``others``: held by somebody else."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots = dict(slots)
        self.others: dict[str, float] = dict.fromkeys(slots, 0.0)
        self.leases: dict[str, Lease] = {}
        self.living: dict[str, FakeWorker] = {}
        self.acquired = 0
        self._next = 0
        self._changed = asyncio.Event()

    def free(self) -> list[str]:
        nodes = []
        for node_id, slots in self.slots.items():
            ours = sum(lease.node_id == node_id for lease in self.leases.values())
            nodes += [node_id] * int(slots - ours - self.others[node_id])
        return nodes

    def borrow(self, node_id: str, slots: float) -> None:
        self.others[node_id] += slots
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def acquire(
        self, count: int, timeout_s: float, say: Callable[[str], None]
    ) -> list[Lease]:
        granted: list[Lease] = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while len(granted) < count:
            for node_id in self.free()[: count - len(granted)]:
                self._next += 1
                lease = Lease(f"lease-{self._next}", node_id, loop.time())
                self.leases[lease.name] = lease
                granted.append(lease)
            if len(granted) == count:
                break
            say(f"NO_RESOURCES: {count - len(granted)} of {count} leases")
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except TimeoutError:
                break
        self.acquired += len(granted)
        return granted

    async def release(self, lease: Lease) -> float:
        worker = self.living.get(lease.name)
        assert worker is None or not worker.alive, f"{lease.name} still has a living process"
        self.leases.pop(lease.name, None)
        self._notify()
        return asyncio.get_running_loop().time()

    async def existing(self) -> list[Lease]:
        return list(self.leases.values())

    async def slots_of_others(self) -> dict[str, float]:
        return dict(self.others)

    async def total_slots(self) -> int:
        return sum(self.slots.values())


class FakeStore:
    """``alive``: set to False, the store has died; ``renewable``: another one can be started."""

    def __init__(self) -> None:
        self.last: GroupRecord | None = None
        self.heartbeats = 0
        self.forgotten: list[Generation] = []
        self.alive = True
        self.renewable = True
        self.renewed = 0

    def _answer(self) -> None:
        if not self.alive:
            raise UnavailableError("the store has ended")

    async def address(self) -> tuple[str, int]:
        self._answer()
        return "store", 1 + self.renewed

    async def heartbeat(self) -> None:
        self._answer()
        self.heartbeats += 1

    async def renew(self) -> bool:
        if self.alive:
            return False
        if not self.renewable:
            raise UnavailableError("no node for another store")
        self.alive, self.last = True, None
        self.renewed += 1
        return True

    async def record(self, record: GroupRecord) -> None:
        self._answer()
        self.last = record

    async def load(self) -> GroupRecord | None:
        self._answer()
        return self.last

    async def forget_generation(self, generation: Generation) -> None:
        self._answer()
        self.forgotten.append(generation)


@dataclass
class _Crossing:
    """A change that members were told to switch to."""

    change: GroupChange
    told: set[WorkerId] = field(default_factory=set)
    crossed: bool = False


class FakeFactory:
    """All worker processes, and the lockstep that binds them.

    ``faults``: (worker id, call) -> the error to raise; ``WorkerLostError`` also ends the
    process. The calls are those of the port, "cross" (as it crosses over), "crossed" and
    "cancelled" (right behind it, before anybody has collected what it reported).
    """

    def __init__(self, leases: FakeLeases) -> None:
        self.leases = leases
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.faults: dict[tuple[int, str], FlexFloorError] = {}
        self.members: tuple[WorkerId, ...] = ()
        self.owner_E: tuple[WorkerId, ...] = ()
        self.crossing: _Crossing | None = None
        self.joined: set[WorkerId] = set()
        self.peak_running = 0
        self.frozen = False
        self.deaf: set[int] = set()
        """Workers that do not notice that they are told to switch (once each)."""
        self.stepping: asyncio.Task[None] | None = None
        self.fetch_s = 0.01
        """How long a fetch of KV takes."""
        self.cancel_s = 0.0
        """How long it takes until a worker lets go of what is cancelled."""
        self.copied: dict[SampleId, tuple[WorkerId, WorkerId]] = {}
        """Samples that came with their KV: from whom, to whom."""
        self.unfetched: set[SampleId] = set()
        """Samples whose KV went with the leaver that had it."""

    async def spawn(self, worker_id: WorkerId, lease: Lease) -> "FakeWorker":
        await asyncio.sleep(0.1)
        worker = FakeWorker(worker_id, lease, self)
        self.workers[worker_id] = worker
        self.leases.living[lease.name] = worker
        return worker

    async def attach(self, worker_id: WorkerId) -> "FakeWorker | None":
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.alive else None

    def living(self) -> list[WorkerId]:
        return sorted(w.worker_id for w in self.workers.values() if w.alive)

    def enter(self, worker: "FakeWorker", members: tuple[WorkerId, ...]) -> None:
        self.joined.add(worker.worker_id)
        if self.joined >= set(members):
            self.members, self.joined = members, set()
            self.owner_E = initial_owners(NUM_EXPERTS, members)
            self.crossing = None
            if self.stepping is not None:
                self.stepping.cancel()
            self.stepping = asyncio.ensure_future(self._step_forever())

    async def stop(self) -> None:
        if self.stepping is not None:
            self.stepping.cancel()
            await asyncio.wait([self.stepping])

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.frozen:
                continue
            if not self._cross():
                for worker_id in self.members:
                    if self.workers[worker_id].alive:
                        self.workers[worker_id].emit(Broken("a collective failed"))
                return
            members = [self.workers[worker_id] for worker_id in self.members]
            running = sum(len(worker.samples) for worker in members)
            self.peak_running = max(self.peak_running, running)
            if any(worker.samples and not worker.held for worker in members):
                versions = {worker.weight_version for worker in members}
                assert len(versions) == 1, f"one group decodes with versions {versions}"
                for worker in members:
                    worker.step()

    def _cross(self) -> bool:
        """Cross over if all were told to. False: a member is gone, the group is broken."""
        crossing = self.crossing
        dead = [w for w in self.members if not self.workers[w].alive]
        if crossing is None or crossing.crossed:
            if dead and crossing is not None and not set(dead) & set(crossing.change.old_members):
                self.roll_back(crossing, "a joiner is gone")
                return True
            return not dead
        change = crossing.change
        everyone = set(change.old_members) | set(change.new_members)
        for worker_id in everyone:
            self.workers[worker_id].fault("cross", quiet=True)
        if any(not self.workers[w].alive for w in change.old_members):
            return False
        if any(not self.workers[w].alive for w in change.joiners):
            self.roll_back(crossing, "a joiner is gone")
        elif crossing.told == everyone:
            crossing.crossed = True
            self.members, self.owner_E = change.new_members, change.owner_E
            check_ownership(self.owner_E, self.members)
            for worker_id in everyone:
                self.workers[worker_id].cross(change)
        return True

    def roll_back(self, crossing: _Crossing, error: str) -> None:
        change = crossing.change
        old_owner_E = self.workers[change.old_members[0]].old_owner_E
        self.members, self.owner_E, self.crossing = change.old_members, old_owner_E, None
        for worker_id in change.old_members:
            self.workers[worker_id].kept.clear()
            self.workers[worker_id].emit(RolledBack(change.generation, error, 0))


class FakeWorker:
    def __init__(self, worker_id: WorkerId, lease: Lease, group: FakeFactory) -> None:
        self.worker_id = worker_id
        self.lease = lease
        self.group = group
        self.alive = True
        self.spec: WorkerSpec | None = None
        self.samples: dict[SampleId, Sample] = {}
        self.kept: dict[SampleId, Sample] = {}
        """Samples that it let go of, whose KV can be fetched."""
        self.steps = 0
        self.held = False
        self.started = False
        self.weight_version: str | None = None
        self.old_owner_E: tuple[WorkerId, ...] = ()
        self._events: list[WorkerEvent] = []
        self._dropped = 0
        self._more = asyncio.Event()
        self._last_step_at = asyncio.get_running_loop().time()
        self._step_ends: deque[float] = deque(maxlen=50)

    def fault(self, call: str, *, quiet: bool = False) -> None:
        error = self.group.faults.pop((self.worker_id, call), None)
        if isinstance(error, WorkerLostError):
            self.die()
        elif error is not None and not quiet:
            raise error
        if not self.alive and not quiet:
            raise WorkerLostError(f"worker {self.worker_id} has ended")

    def die(self) -> None:
        self.alive = False
        self._more.set()

    def emit(self, event: WorkerEvent) -> None:
        self._events.append(event)
        self._more.set()

    def kv_capacity_tokens(self) -> int:
        owner_E = self.group.owner_E
        assert self.spec is not None
        held = owner_E.count(self.worker_id)
        if not held:
            held = -(-NUM_EXPERTS // len(self.spec.members))
        extra = held - -(-NUM_EXPERTS // len(self.spec.members))
        blocks = (self.spec.kv_memory_bytes - extra * EXPERT_BYTES) // KV_BLOCK_BYTES
        return (blocks - 1) * KV_BLOCK_TOKENS

    def step(self) -> None:
        self.steps += 1
        self._last_step_at = asyncio.get_running_loop().time()
        self._step_ends.append(self._last_step_at)
        need = sum(-(-s.max_context_tokens // KV_BLOCK_TOKENS) for s in self.samples.values())
        assert need * KV_BLOCK_TOKENS <= self.kv_capacity_tokens(), "more KV than there is"
        assert self.spec is not None
        assert len(self.samples) <= self.spec.max_samples, "more samples than it decodes at once"
        for sample in [] if self.held else list(self.samples.values()):
            start = len(sample.generated_ids)
            token = expected_token(sample.seed, len(sample.prompt_ids) + start)
            longer = sample.continued((*sample.generated_ids, token))
            self.samples[sample.sample_id] = longer
            reason = None
            if len(longer.generated_ids) == sample.replay_stop_tokens:
                reason = FinishReason.STOP
            elif len(longer.generated_ids) == sample.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                del self.samples[sample.sample_id]
            assert self.weight_version is not None
            tokens = Tokens(sample.sample_id, start, (token,), (-token / VOCAB,), reason)
            self.emit(replace(tokens, weight_version=self.weight_version))

    def cross(self, change: GroupChange) -> None:
        self.started = True
        if self.worker_id in change.leavers:
            self.kept = dict(self.samples)
            self.evict_all()
        first_step_s = 0.0 if self.worker_id in change.leavers else STEP_S
        phases_s = {"agree": 0.01, "commit": 0.02}
        self.emit(Switched(change.generation, 0.03, first_step_s, phases_s))
        self.fault("crossed", quiet=True)

    def evict_all(self) -> None:
        for sample_id in list(self.samples):
            sample = self.samples.pop(sample_id)
            self.emit(Evicted(sample_id, sample.context_tokens - 1))

    async def build(self, spec: WorkerSpec) -> BuildReport:
        await asyncio.sleep(BUILD_S)
        self.fault("build")
        self.spec = spec
        self.weight_version = "0"
        return BuildReport(
            self.worker_id,
            FACTS,
            self.kv_capacity_tokens(),
            {"engine": BUILD_S},
            node_id=self.lease.node_id,
            slot=f"GPU:{self.lease.name}",
            pid=1000 + self.worker_id,
        )

    async def start(self) -> None:
        self.fault("start")
        assert self.spec is not None
        self.started = True
        self.group.enter(self, self.spec.members)

    async def fetch_kv(self, sample_ids: list[SampleId]) -> FetchedKv:
        self.fault("fetch_kv")
        await asyncio.sleep(self.group.fetch_s)
        fetched = {i: (self, self.kept.pop(i)) for i in sample_ids if i in self.kept}
        return FetchedKv(tuple(fetched), KV_BLOCK_BYTES * len(fetched), fetched)

    async def submit(self, samples: list[Sample], kv: FetchedKv | None = None) -> None:
        self.fault("submit")
        for sample in samples:
            if kv is not None and sample.sample_id in kv.payload:
                source, computed = kv.payload[sample.sample_id]
                assert computed == sample, "KV of other tokens than the sample has"
                self.group.copied[sample.sample_id] = (source.worker_id, self.worker_id)
        self.samples |= {sample.sample_id: sample for sample in samples}

    async def hold(self) -> None:
        await asyncio.sleep(HOLD_S)
        self.fault("hold")
        self.held = True

    async def unhold(self) -> None:
        await asyncio.sleep(HOLD_S)
        self.fault("unhold")
        self.held = False

    async def load_weights(self, version: str, chunks: tuple[Any, ...]) -> LoadReport:
        assert self.held or not self.started, "weights were changed under a worker that decodes"
        self.weight_version = None
        await asyncio.sleep(LOAD_S)
        self.fault("load_weights")
        assert chunks == (version,), "these are not the weights of this version"
        self.weight_version = version
        return LoadReport(self.worker_id, version, 7, len(self.samples), {"load": LOAD_S})

    async def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        self.fault("cancel")
        if not self.group.cancel_s:
            self._let_go(sample_ids, keep_kv)
            return
        asyncio.get_running_loop().call_later(
            self.group.cancel_s, self._let_go, sample_ids, keep_kv
        )

    def _let_go(self, sample_ids: list[SampleId], keep_kv: bool) -> None:
        if keep_kv:
            self.kept.clear()
        for sample_id in sample_ids:
            sample = self.samples.pop(sample_id, None)
            if sample is None:
                continue
            if keep_kv:
                self.kept[sample_id] = sample
            self.emit(Evicted(sample_id, sample.context_tokens - 1 if keep_kv else 0))
        self.fault("cancelled", quiet=True)

    async def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        self.fault("collect")
        if acknowledged > self._dropped:
            self._events = self._events[acknowledged - self._dropped :]
            self._dropped = acknowledged
        if not self._events:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), wait_s)
        self.fault("collect")
        now = asyncio.get_running_loop().time()
        return WorkerReport(
            self.worker_id,
            self._dropped + len(self._events),
            tuple(self._events),
            StepStats(
                steps=self.steps,
                step_s_sum=self.steps * STEP_S,
                last_step_age_s=now - self._last_step_at,
                running=len(self.samples),
                kv_used_tokens=sum(s.context_tokens for s in self.samples.values()),
                kv_capacity_tokens=self.kv_capacity_tokens(),
                max_token_gap_s=STEP_S,
                recent_step_s=(STEP_S,) * len(self._step_ends),
                recent_step_end_at=tuple(self._step_ends),
            ),
        )

    async def prepare(self, change: GroupChange) -> PrepareReport:
        await asyncio.sleep(0.5)
        self.fault("prepare")
        if self.worker_id in change.joiners:
            self.weight_version = change.weight_version
        assert self.weight_version == change.weight_version
        self.old_owner_E = self.group.owner_E
        if self.group.crossing is None or self.group.crossing.change != change:
            self.group.crossing = _Crossing(change)
        experts = change.experts_of(self.worker_id)
        return PrepareReport(self.worker_id, experts, 10, {"experts": 0.5}, 0)

    async def discard(self, generation: Generation) -> None:
        self.fault("discard")
        self.group.crossing = None

    async def switch(self, generation: Generation) -> None:
        self.fault("switch")
        crossing = self.group.crossing
        if crossing is None:
            return  # it was rolled back before this call came
        assert crossing.change.generation == generation
        if self.worker_id in self.group.deaf:
            self.group.deaf.remove(self.worker_id)
        else:
            crossing.told.add(self.worker_id)

    async def finalize(self, generation: Generation) -> FinalizeReport:
        self.fault("finalize")
        crossing = self.group.crossing
        if crossing is not None and crossing.crossed:
            self.group.crossing = None
        return FinalizeReport(self.worker_id, {"drop": 0.0}, self.kv_capacity_tokens())

    async def rollback(self, generation: Generation) -> None:
        self.fault("rollback")
        crossing = self.group.crossing
        if crossing is not None and crossing.change.generation == generation:
            if crossing.crossed:
                self.group.roll_back(crossing, "asked to")
            else:
                self.group.crossing = None  # nobody has left the old generation: nothing to tell

    async def leave(self) -> None:
        self.fault("leave")
        assert not self.samples, "it leaves with samples"
        self.group.unfetched |= set(self.kept)
        await asyncio.sleep(0.2)
        self.die()

    async def kill(self) -> None:
        self.die()
        await asyncio.sleep(0.05)
