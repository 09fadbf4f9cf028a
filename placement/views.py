"""What a decision may look at, and what it may answer: frozen records only.

The coordinator makes the views from its own records, a simulator from its own; both hand
them to the same functions. Lengths are in tokens, memory is counted in KV tokens.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from placement.ids import SampleId, WorkerId

CERTAIN_SIGMA = 1e-3  # half a token of 500; none at all would make every surprise infinite


@dataclass(frozen=True, slots=True)
class LengthBelief:
    """How long a response is thought to become: log-normal, before conditioning.

    It is about the whole response, from its first token on and as if there were no limit. Who
    uses it conditions on what is generated already and cuts at the limit
    (``placement.lengths``).

    Attributes:
        mu, sigma: mean and standard deviation of the natural log of the length in tokens.
    """

    mu: float
    sigma: float

    @classmethod
    def certain(cls, tokens: int) -> "LengthBelief":
        """Nothing but this length: an oracle's."""
        return cls(math.log(tokens), CERTAIN_SIGMA)


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sample as a decision sees it.

    Attributes:
        context_tokens: prompt plus what is generated so far.
        max_context_tokens: prompt plus ``max_tokens``; it never needs more KV than this.
        worker_id: where it decodes; None while it is queued.
        order: arrival order, unique and ascending.
        generated_tokens: the part of ``context_tokens`` that is response.
        prompt_key: the same for the same prompt, in this rollout and in others; empty where
            nobody keeps a history.
        belief: None where nobody predicts; then rules that know no lengths must do.
        priority: queued samples of a higher one start first.
    """

    sample_id: SampleId
    context_tokens: int
    max_context_tokens: int
    order: int
    worker_id: WorkerId | None = None
    generated_tokens: int = 0
    prompt_key: str = ""
    belief: LengthBelief | None = None
    priority: int = 0

    @property
    def max_response_tokens(self) -> int:
        """The response's limit."""
        return self.max_context_tokens - (self.context_tokens - self.generated_tokens)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A member of the group.

    Attributes:
        max_samples: most samples it decodes at once.
        kv_capacity_tokens: KV it has now, beside the experts it holds now.
    """

    worker_id: WorkerId
    max_samples: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class GroupView:
    """The group at one moment.

    Attributes:
        num_experts: experts per layer.
        kv_tokens_at_width: ``kv_tokens_at_width[w]`` is the KV of the worker that holds most
            experts when ``w`` workers share them evenly; index 0 is unused (0).
        max_workers: the most workers the service may lease.
        floor_workers: the fewest workers that hold all experts and the KV still needed.
        any_finished: a sample of the current load has already ended.
        kv_block_tokens: KV is handed out in blocks of so many tokens; a sample's need is
            rounded up to whole blocks.
        nobody_leaves: a static rollout is open: the group grows to ``max_workers`` and stays.
        steps: lockstep steps since the current load began; rules pace themselves by it. Where
            nobody counts it stays 0.
        num_ended: samples of the current load that have ended.
        num_preempted: how often, in the current load, a worker ran out of KV and took a sample's
            away.
        num_changes: changes of the width since the current load began.
    """

    workers: tuple[WorkerView, ...]
    running: tuple[SampleView, ...]
    queued: tuple[SampleView, ...]
    num_experts: int
    kv_tokens_at_width: tuple[int, ...]
    max_workers: int
    floor_workers: int
    any_finished: bool
    kv_block_tokens: int = 1
    nobody_leaves: bool = False
    steps: int = 0
    num_ended: int = 0
    num_preempted: int = 0
    num_changes: int = 0


@dataclass(frozen=True, slots=True)
class Binding:
    """A queued sample starts (or goes on) on this worker."""

    sample_id: SampleId
    worker_id: WorkerId


class MoveKind(StrEnum):
    """How a running sample's KV gets to another worker."""

    COPY = "copy"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Move:
    """A running sample goes on at another worker."""

    sample_id: SampleId
    source: WorkerId
    destination: WorkerId
    by: MoveKind


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Bindings, in the order in which they are to be made, and moves that even the load out."""

    bindings: tuple[Binding, ...]
    moves: tuple[Move, ...] = ()


class WidthReason(StrEnum):
    """Why the group keeps or changes its width. Also a log field and a metric label."""

    KEEP = "keep"
    QUEUE = "queue"  # queued samples want more workers
    IDLE = "idle"  # workers without samples leave
    CONSOLIDATE = "consolidate"  # the samples of several workers fit on fewer
    STATIC = "static"  # the rollout asked that nobody leaves
    DRAINED = "drained"  # nothing left to decode: the idle policy decides


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a decision is thought to bring: to be held against what came.

    "With" is with the decision and all releases that are planned after it; "without" is at the
    present width to the end. Everything counts from the decision to the end of the load.

    Attributes:
        freed_worker_steps: worker-steps that slots are free, the others decoding.
    """

    steps_with: float
    steps_without: float
    seconds_with: float
    seconds_without: float
    freed_worker_steps: float


@dataclass(frozen=True, slots=True)
class WidthDecision:
    """How many workers there should be, and who leaves.

    Attributes:
        width: number of workers wanted; more than now means grow.
        leavers: who leaves when ``width`` is less than now; their unfinished samples go back
            to the head of the queue with all their tokens.
        explanation: one line with the numbers that decided.
        predicted: None where the rule predicts nothing.
    """

    width: int
    leavers: tuple[WorkerId, ...]
    reason: WidthReason
    explanation: str
    predicted: Prediction | None = None
