"""What a simulated rollout took: the measures of a measured one, counted the same way."""

from dataclasses import dataclass, field

from placement.ids import WorkerId
from placement.views import Prediction, WidthReason


@dataclass(frozen=True, slots=True)
class WidthChange:
    """A change of the group, as it was decided and as it came.

    Attributes:
        step, at_s: when it was decided; the old group is occupied until ``ended_s``.
        moved_samples: unfinished samples of leavers.
        predicted: what the rule expected of it.
        steps_after: steps from there to the end of the rollout, to be held against it.
    """

    step: int
    at_s: float
    ended_s: float
    old_width: int
    new_width: int
    reason: WidthReason
    explanation: str
    moved_samples: int
    moved_expert_bytes: int
    moved_kv_bytes: int
    predicted: Prediction | None = None
    steps_after: int = 0


@dataclass(frozen=True, slots=True)
class Occupation:
    """One worker from its lease's grant to its removal; ``slot`` counts from 0."""

    worker_id: WorkerId
    slot: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes:
    span_s: from the acceptance to the end of the last sample.
    occupied_worker_s, worker_steps: leased slots, by time and by lockstep steps.
    idle_worker_s: the part of it in which a member had no sample to decode.
    preempted_tokens: context that had to be recomputed because KV ran out.
    changing_s: time in which a change of the group held decoding up.
    unplaced: samples that a release left waiting in the queue.
    """

    policy: str
    num_samples: int
    total_tokens: int
    span_s: float
    steps: int
    occupied_worker_s: float
    worker_steps: int
    idle_worker_s: float
    prefill_s: float
    changing_s: float
    preempted_tokens: int
    num_preemptions: int
    num_moves: int
    restarts: int
    unplaced: int
    changes: tuple[WidthChange, ...]
    occupations: tuple[Occupation, ...] = field(repr=False)

    @property
    def throughput(self) -> float:
        """Tokens per second of the span."""
        return self.total_tokens / self.span_s

    @property
    def efficiency(self) -> float:
        """Tokens per occupied worker-second."""
        return self.total_tokens / self.occupied_worker_s

    @property
    def tokens_per_worker_step(self) -> float:
        return self.total_tokens / self.worker_steps
