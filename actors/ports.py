"""What the coordinator needs from the outside: workers, leases and a place to remember.

Protocols only. ``actors.ray_*`` implement them with Ray, unit tests with fakes that are named
as such.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.control_api import PauseMode
from actors.protocol import (
    BuildReport,
    FinalizeReport,
    LoadReport,
    ModelFacts,
    PrepareReport,
    WorkerReport,
    WorkerSpec,
)
from actors.sample_kv import FetchedKv
from actors.weights_keeper import ServedVersion
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import Sample


class WorkerPort(Protocol):
    """A worker as the coordinator sees it. Every call may raise ``WorkerLostError``."""

    worker_id: WorkerId

    async def build(self, spec: WorkerSpec) -> BuildReport:
        """Host the engine; a founder also meets its peers.

        Raises: ModelRefusedError, ConfigError.
        """
        ...

    async def start(self) -> None:
        """Enter the decode loop (founders; a joiner enters it with ``switch``)."""
        ...

    async def submit(self, samples: list[Sample], kv: FetchedKv | None = None) -> None:
        """Take samples; they enter at the next step boundary. One that the engine refuses
        ends with ``Tokens(finish_reason=FAILED, error=...)``. ``kv`` is what another worker has
        computed for some of them; what does not fit is computed anew."""
        ...

    async def fetch_kv(self, sample_ids: list[SampleId]) -> FetchedKv:
        """KV of samples that this worker let go of when it crossed over as a leaver, or when they
        were cancelled with ``keep_kv``; each once, until it leaves. Those whose KV has gone are
        left out."""
        ...

    async def hold(self) -> None:
        """Decode nothing until ``unhold``; returns when no step of this worker's samples is under
        way. Samples and their KV stay, more can be submitted, and a change of membership goes on
        as ever. Idempotent."""
        ...

    async def unhold(self) -> None:
        """Decode on. Idempotent."""
        ...

    async def load_weights(self, version: str, chunks: tuple[Any, ...]) -> LoadReport:
        """Replace weights while this worker is held, or before it starts; then compute unfinished
        samples anew.

        Args:
            chunks: handles from a ``WeightsKeeper``.

        Raises:
            WeightUpdateError: the weights are of several versions now; load one in full.
        """
        ...

    async def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        """Let go of samples; each is answered by ``Evicted``, unless it ended before. With
        ``keep_kv`` what was computed for them can be fetched, until the next such call."""
        ...

    async def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        """Events after ``acknowledged``; waits up to ``wait_s`` for the first one."""
        ...

    async def prepare(self, change: GroupChange) -> PrepareReport:
        """In the background: groups of the new generation, dense weights, experts.

        Raises: MembershipError; then nothing of the live generation was touched.
        """
        ...

    async def discard(self, generation: Generation) -> None:
        """Give up a prepared generation that was not switched to."""
        ...

    async def switch(self, generation: Generation) -> None:
        """Cross over at the first step boundary that all old members agree on.

        Returns at once; ``Switched`` or ``RolledBack`` tells how it ended.
        """
        ...

    async def finalize(self, generation: Generation) -> FinalizeReport:
        """Drop what a rollback would need."""
        ...

    async def rollback(self, generation: Generation) -> None:
        """Return to the old generation (a leaver that stands by, or a member that has not
        noticed)."""
        ...

    async def leave(self) -> None:
        """Shut the engine down and end the process. Returns when the process has gone."""
        ...

    async def kill(self) -> None:
        """End the process, however it is. Returns when it has gone."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One placement group of one bundle, granted.

    Attributes:
        name: of the placement group, unique in our namespace; it can be found again by it.
        granted_at: wall clock, when Ray reported the grant.
    """

    name: str
    node_id: str
    granted_at: float


class LeasePort(Protocol):
    """Capacity of the cluster, one lease per worker."""

    async def acquire(
        self, count: int, timeout_s: float, say: Callable[[str], None]
    ) -> list[Lease]:
        """Up to ``count`` leases: what was granted within ``timeout_s`` (pending requests are
        cancelled then). ``say`` is told what is awaited and why, as it changes."""
        ...

    async def release(self, lease: Lease) -> float:
        """Remove the lease, whose process has gone. Returns the wall clock of the removal."""
        ...

    async def existing(self) -> list[Lease]:
        """Leases of ours that an earlier coordinator has left."""
        ...

    async def slots_of_others(self) -> dict[str, float]:
        """Per node: worker slots (in units of a worker's bundle) that something outside the
        service holds now, as Ray reports it."""
        ...

    async def total_slots(self) -> int:
        """Worker slots that the cluster's nodes have altogether, free or not."""
        ...


class WorkerFactory(Protocol):
    """Worker processes, each inside its lease."""

    async def spawn(self, worker_id: WorkerId, lease: Lease) -> WorkerPort:
        """Start the process (``build`` comes next)."""
        ...

    async def attach(self, worker_id: WorkerId) -> WorkerPort | None:
        """A living worker of an earlier coordinator, or None."""
        ...


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What a coordinator that comes back must know. Written at each change of membership.

    Attributes:
        next_worker_id, next_generation: ids below these were used.
        members: in rank order.
        owner_E: owner of each expert.
        lease_names: per member, the name of its lease.
        build_reports: per member.
        in_change: workers that join or leave by a change that had not ended when this was
            written: a coordinator that comes back then begins afresh.
        pause_mode, asleep: what was asked of the group.
        facts: of the model; a group that is asleep has no build report.
        weights: that the group decodes with, and that one which is founded later is to have.
        next_weights: that are being loaded: a coordinator that comes back then begins afresh.
    """

    next_worker_id: WorkerId
    next_generation: Generation
    generation: Generation
    members: tuple[WorkerId, ...]
    owner_E: tuple[WorkerId, ...]
    lease_names: tuple[str, ...]
    build_reports: tuple[BuildReport, ...]
    in_change: tuple[WorkerId, ...] = ()
    pause_mode: PauseMode | None = None
    asleep: bool = False
    facts: ModelFacts | None = None
    weights: ServedVersion = field(default_factory=ServedVersion)
    next_weights: ServedVersion | None = None


class GroupStore(Protocol):
    """The small process that outlives workers and coordinators: rendezvous and memory."""

    async def address(self) -> tuple[str, int]:
        """Host and port of the TCPStore."""
        ...

    async def heartbeat(self) -> None:
        """A coordinator is alive: the reaper's clock starts again."""
        ...

    async def renew(self) -> bool:
        """Start another store if this one has gone. True: it is another one, which remembers
        nothing, and where members of before cannot meet."""
        ...

    async def record(self, record: GroupRecord) -> None: ...

    async def load(self) -> GroupRecord | None: ...

    async def forget_generation(self, generation: Generation) -> None:
        """Delete the rendezvous keys of a retired or discarded generation."""
        ...
