"""Who is there: the workers with their processes and leases, and the membership among them.

A worker is on the roster from the grant of its lease until the lease has been removed, so
whatever is on the roster is what there is to clean up.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from actors.control_api import PauseMode
from actors.ports import GroupRecord, Lease, WorkerPort
from actors.protocol import BuildReport, ModelFacts, StepStats
from actors.rollout_api import WorkerStatus
from actors.weights_keeper import ServedVersion
from placement.ids import ExpertId, Generation, WorkerId
from placement.membership import GroupChange
from placement.views import WorkerView


class WorkerState(StrEnum):
    BUILDING = "building"
    DECODING = "decoding"
    IDLE = "idle"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Step:
    """``end_at``: the worker's wall clock."""

    seconds: float
    end_at: float


@dataclass(slots=True, eq=False)
class Worker:
    """One worker, from its lease to the lease's removal.

    Attributes:
        spawning: the start of its process, until ``port`` is there.
        kv_capacity_tokens: what it has now.
        kv_limit_tokens: what it will have after the change in progress, if that is less.
        cursor: last event that was collected and journaled.
        recent_steps: its last ones, newest last.
    """

    worker_id: WorkerId
    lease: Lease
    port: WorkerPort | None = None
    spawning: asyncio.Task[WorkerPort] | None = None
    build: BuildReport | None = None
    building: bool = True
    leaving: bool = False
    kv_capacity_tokens: int = 0
    kv_limit_tokens: int | None = None
    cursor: int = 0
    stats: StepStats | None = None
    recent_steps: deque[Step] = field(default_factory=lambda: deque(maxlen=50))
    collecting: asyncio.Task[None] | None = None
    removed_at: float = 0.0

    @property
    def live(self) -> WorkerPort:
        assert self.port is not None, f"worker {self.worker_id} has no process yet"
        return self.port

    def built(self, report: BuildReport) -> None:
        self.build = report
        self.building = False
        self.kv_capacity_tokens = report.kv_capacity_tokens

    def take_stats(self, stats: StepStats) -> list[Step]:
        """Remember ``stats``; returns the steps since the last ones (bounded)."""
        num_new = stats.steps - (self.stats.steps if self.stats else 0)
        recent = list(map(Step, stats.recent_step_s, stats.recent_step_end_at))
        steps = recent[-num_new:] if num_new > 0 else []
        self.recent_steps.extend(steps)
        self.stats = stats
        return steps

    def view(self, max_samples: int) -> WorkerView:
        limit = self.kv_limit_tokens
        capacity = self.kv_capacity_tokens
        return WorkerView(
            worker_id=self.worker_id,
            max_samples=max_samples,
            kv_capacity_tokens=capacity if limit is None else min(limit, capacity),
        )


class Roster:
    """``members`` in rank order; ``owner_E``: owner of each expert, the same in every layer."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.members: tuple[WorkerId, ...] = ()
        self.generation = Generation(0)
        self.owner_E: tuple[WorkerId, ...] = ()
        self.next_worker_id = WorkerId(0)
        self.next_generation = Generation(0)
        self.pause_mode: PauseMode | None = None
        self.asleep = False
        """What was asked of the group, and is recorded with it."""
        self.facts: ModelFacts | None = None
        """Of the model, once a worker has said them."""
        self.weights = ServedVersion()
        self.next_weights: ServedVersion | None = None
        """What is served, and what is being loaded."""
        self._in_change: tuple[WorkerId, ...] = ()
        self._step_offset: dict[WorkerId, int] = {}
        self._steps = 0

    def new_worker_id(self) -> WorkerId:
        worker_id = self.next_worker_id
        self.next_worker_id = WorkerId(worker_id + 1)
        return worker_id

    def new_generation(self) -> Generation:
        generation = self.next_generation
        self.next_generation = Generation(generation + 1)
        return generation

    def member_workers(self) -> list[Worker]:
        return [self.workers[worker_id] for worker_id in self.members]

    def found(
        self, members: tuple[WorkerId, ...], generation: Generation, owner_E: tuple[WorkerId, ...]
    ) -> None:
        self.members, self.generation, self.owner_E = members, generation, owner_E

    def adopt(self, change: GroupChange) -> None:
        """The new membership stands."""
        self.found(change.new_members, change.generation, change.owner_E)

    def disband(self) -> None:
        """There is no group any more (its workers may still have to be ended)."""
        self.members, self.owner_E = (), ()

    def remove(self, worker_id: WorkerId) -> None:
        """Its process and its lease have gone."""
        del self.workers[worker_id]
        self._step_offset.pop(worker_id, None)

    def count_steps(self, worker: Worker, stats: StepStats) -> int:
        """New steps of the group according to ``worker``.

        The group steps in lockstep, so its count is that of whoever is ahead. A worker's own
        count starts with its process: its offset is set when it is heard first.
        """
        offset = self._step_offset.setdefault(worker.worker_id, self._steps - stats.steps)
        news = max(0, stats.steps + offset - self._steps)
        self._steps += news
        return news

    def expect_steps_from_zero(self, members: tuple[WorkerId, ...]) -> None:
        """A group that was just founded: its members have made no step yet."""
        for worker_id in members:
            self._step_offset[worker_id] = self._steps

    def record(self, in_change: tuple[WorkerId, ...] = ()) -> GroupRecord:
        self._in_change = in_change
        return self.record_again()

    def record_again(self) -> GroupRecord:
        """With the same workers in a change as the last time."""
        workers = self.member_workers()
        reports = tuple(worker.build for worker in workers if worker.build is not None)
        return GroupRecord(
            next_worker_id=self.next_worker_id,
            next_generation=self.next_generation,
            generation=self.generation,
            members=self.members,
            owner_E=self.owner_E,
            lease_names=tuple(worker.lease.name for worker in workers),
            build_reports=reports,
            in_change=self._in_change,
            pause_mode=self.pause_mode,
            asleep=self.asleep,
            facts=self.facts,
            weights=self.weights,
            next_weights=self.next_weights,
        )

    def state_of(self, worker: Worker, busy: bool) -> WorkerState:
        if worker.leaving:
            return WorkerState.LEAVING
        if worker.building or worker.worker_id not in self.members:
            return WorkerState.BUILDING
        return WorkerState.DECODING if busy else WorkerState.IDLE

    def status_of(self, worker: Worker, num_running: int) -> WorkerStatus:
        is_member = worker.worker_id in self.members
        stats, build = worker.stats, worker.build
        return WorkerStatus(
            worker_id=worker.worker_id,
            state=self.state_of(worker, num_running > 0),
            rank=self.members.index(worker.worker_id) if is_member else None,
            experts=tuple(
                ExpertId(e) for e, owner in enumerate(self.owner_E) if owner == worker.worker_id
            ),
            node_id=worker.lease.node_id,
            slot=build.slot if build else "",
            running=num_running,
            kv_used_tokens=stats.kv_used_tokens if stats else 0,
            kv_capacity_tokens=worker.kv_capacity_tokens,
            steps=stats.steps if stats else 0,
            leased_at=worker.lease.granted_at,
            pid=build.pid if build else 0,
        )
