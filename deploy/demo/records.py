"""What the demo collects while it runs: frozen records, all of them measured.

The service's own records (``actors.rollout_api``) are kept as they came; what is added is when
something reached the client, and what the other job says of itself.
"""

from dataclasses import dataclass

from actors.rollout_api import OperationStatus, RolloutStatus, SampleResult, WorkerStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The workers at one moment, as ``GET /v1/workers`` told them."""

    at: float
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class ArrivedSample:
    """A sample that has ended, and when its line reached the client."""

    at: float
    result: SampleResult


@dataclass(frozen=True, slots=True)
class Replay:
    """One rollout, replayed over HTTP.

    Attributes:
        operations: changes of the group that began between acceptance and end.
        snapshots: oldest first, polled at the demo's own interval.
    """

    status: RolloutStatus
    samples: tuple[ArrivedSample, ...]
    operations: tuple[OperationStatus, ...]
    snapshots: tuple[Snapshot, ...]

    @property
    def started_at(self) -> float:
        return self.status.accepted_at

    @property
    def ended_at(self) -> float:
        return self.status.accepted_at + self.status.usage.span_s


@dataclass(frozen=True, slots=True)
class BorrowedSlot:
    """A slot that the other job held.

    Attributes:
        started_at: the other job's actor ran its first line there.
        first_chunk_at: it finished its first piece of work; None if it never did.
        returned_at: its process had gone.
        chunks: pieces of work done.
    """

    node_id: str
    slot: str
    pid: int
    started_at: float
    first_chunk_at: float | None
    returned_at: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and of what a result was made.

    Attributes:
        commit: of the checkout, with "-dirty" behind it if tracked files differ; "unknown"
            outside a checkout.
        accelerators: what the four slots are ("4 logical slots", or the GPUs' name).
    """

    commit: str
    cores: int
    memory_bytes: int
    cpu_model: str
    accelerators: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class DemoRecords:
    """All that a report is made from.

    Attributes:
        regrown: the rollout after the slots came back, of the same samples with
            ``regrown_max_tokens``; None in the short demo.
        regrow_operations: changes of the group from the end of ``elastic`` to the end.
        num_slots: workers that the service may lease.
        exact: decoded in exact mode, so that outputs must not differ.
        borrowed: by the other job, whose clock is the same machine's.
        known_lengths: the planner was shown the replayed lengths: an oracle.
    """

    machine: Machine
    trace_sha256: str
    num_slots: int
    short: bool
    static: Replay
    elastic: Replay
    borrowed: tuple[BorrowedSlot, ...]
    exact: bool = True
    regrown: Replay | None = None
    regrown_max_tokens: int | None = None
    regrow_operations: tuple[OperationStatus, ...] = ()
    known_lengths: bool = False
