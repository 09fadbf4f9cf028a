"""What the coordinator offers to its callers (the HTTP service, the demo, tests).

Records only; all of them pickle. Times are seconds since the epoch unless a name says
otherwise.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from actors.control_api import PausePort, WeightsGroup, WeightStatus, WeightUpdate
from actors.token_detail import RoutingLayout, TokenDetail
from actors.weight_spans import WeightVersions
from placement.errors import FlexFloorError
from placement.ids import Generation, RolloutId, SampleId, WorkerId
from placement.membership import Phase
from placement.samples import FinishReason, Sampling
from placement.views import Prediction


class Strategy(StrEnum):
    """``ELASTIC``: late binding, workers are released. ``STATIC``: contiguous chunks of samples
    per worker, as verl places them, and nobody leaves until the rollout has ended."""

    ELASTIC = "elastic"
    STATIC = "static"


class CancelledBy(StrEnum):
    """What ended a sample before it had finished."""

    CALLER = "caller"
    DEADLINE = "deadline"  # the rollout's ``deadline_s`` was over
    OVERSAMPLING = "oversampling"  # enough others of its prompt had finished
    SERVICE = "service"  # it was paused or shut down; the error says which


@dataclass(frozen=True, slots=True)
class SampleStart:
    """Where a sample begins.

    Attributes:
        generated_ids: tokens that its response has already: a partial that goes on. They count
            against ``max_tokens``.
        seed: of the sample; None derives it from the request's.
    """

    generated_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A batch of prompts, each to be answered ``num_samples`` times.

    Attributes:
        prompts: token ids per prompt.
        num_samples: samples that are started per prompt.
        samplings: one per prompt, or one for all.
        seed: seed of the request; sample seeds derive from it.
        replay_stop_tokens: replay only, per prompt one length per sample (see ``Sample``).
        sample_samplings: overrides per prompt and sample, for replays that mix settings.
        terms: the caller's own; means nothing here, but a request that repeats an id has to
            repeat it too.
        priority: where samples wait, those of a higher one go first.
        deadline_s: from acceptance; what has not ended then is aborted.
        num_wanted: of each prompt's samples: when so many have finished, the others are
            aborted. None waits for all of them.
        starts: one per sample, prompt by prompt; None: all begin at their prompt.
    """

    rollout_id: RolloutId
    prompts: tuple[tuple[int, ...], ...]
    num_samples: int
    samplings: tuple[Sampling, ...]
    seed: int
    strategy: Strategy = Strategy.ELASTIC
    replay_stop_tokens: tuple[tuple[int, ...], ...] | None = None
    sample_samplings: tuple[tuple[Sampling, ...], ...] | None = None
    terms: str = ""
    priority: int = 0
    deadline_s: float | None = None
    num_wanted: int | None = None
    starts: tuple[SampleStart, ...] | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """A sample that has ended, or, in an abort's answer, what there is of it.

    Attributes:
        token_ids, logprobs: what was decoded here, behind ``start``.
        start: how many tokens of the response were given with the request.
        cancelled_by: of an aborted sample.
        worker_ids: where it decoded, in order; more than one means that it moved.
        finish_reason: None while it is running.
        weight_versions: with which weights which tokens were decoded: (position in the response of
            the first token, version) of each span; more than one if the weights changed on the way.
        weight_version: of the last token.
        prompt_tokens: length of its prompt.
        detail: what its ``Sampling`` asks for beside ids and logprobs; each dialect has its own
            way of saying it.
    """

    sample_id: SampleId
    prompt_index: int
    sample_index: int
    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    error: str = ""
    worker_ids: tuple[WorkerId, ...] = ()
    weight_version: str = "0"
    queued_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    detail: Annotated[TokenDetail | None, Field(exclude=True)] = None
    start: int = 0
    cancelled_by: CancelledBy | None = None
    weight_versions: WeightVersions = ()


class RolloutState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class RolloutUsage:
    """Measured at the leases, over the rollout's span (first acceptance to last terminal).

    ``occupied + freed + not_yet_leased + shared = peak_slots * span_s``. ``shared`` is what
    rollouts that were open at the same time account for: 0 for a rollout that was alone.
    """

    span_s: float
    occupied_worker_s: float
    freed_worker_s: float
    used_worker_s: float
    not_yet_leased_worker_s: float
    peak_slots: int
    occupied_worker_steps: int
    steps: int
    shared_worker_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    rollout_id: RolloutId
    state: RolloutState
    strategy: Strategy
    seed: int
    num_samples: int
    num_ended: int
    num_queued: int
    num_running: int
    response_tokens: int
    num_moved: int
    accepted_at: float
    ended_at: float | None
    waiting_for: str
    """What the rollout waits for ("" when it decodes)."""
    usage: RolloutUsage
    priority: int = 0
    deadline_at: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """Ended samples after a cursor. ``done``: nothing more will come behind ``cursor``."""

    samples: tuple[SampleResult, ...]
    cursor: int
    done: bool


@dataclass(frozen=True, slots=True)
class SampleNews:
    """What one sample has beyond a count of tokens. ``start``: index of the first one.

    ``weight_versions``: as of ``SampleResult``, of these tokens.
    """

    prompt_index: int
    sample_index: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    error: str = ""
    weight_version: str = "0"
    detail: Annotated[TokenDetail | None, Field(exclude=True)] = None
    cancelled_by: CancelledBy | None = None
    weight_versions: WeightVersions = ()


@dataclass(frozen=True, slots=True)
class TokenWish:
    """Wanted: what is new of one rollout. ``known``: as of ``CoordinatorPort.tokens``."""

    rollout_id: RolloutId
    known: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What samples got behind a cursor, at most one entry per sample.

    Whoever reads on from ``cursor`` gets every token and every ending once. ``done``: nothing
    more will come behind it.
    """

    news: tuple[SampleNews, ...]
    cursor: int
    done: bool


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker_id: WorkerId
    state: str
    """building, decoding, idle, leaving."""
    rank: int | None
    experts: tuple[int, ...]
    node_id: str
    slot: str
    """The accelerator that Ray assigned ("GPU:2"), or "" where slots have no identity."""
    running: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps: int
    leased_at: float
    pid: int


@dataclass(frozen=True, slots=True)
class ReleasedSlot:
    """When a slot went back, and when somebody else was first seen on it."""

    worker_id: WorkerId
    node_id: str
    slot: str
    decided_at: float
    removed_at: float


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """One change of the group, from its decision to its end.

    Attributes:
        pause_s: longest pause over the survivors (end of last to start of next step).
        phases_s: seconds of each phase; "pause.*" are parts of the pause.
        gap_s: longest interval in which a survivor emitted no token, around the change.
        steps_before_s, steps_during_s: seconds of the last 50 steps before, and of the steps
            during, the preparation (bounded).
        finished_ratio_at_start: ended samples over accepted ones, of the rollouts that have been
            open without a gap.
        predicted: what a release was thought to bring, where the rule predicts.
        measured_steps: steps from that decision until those rollouts had ended; None while they
            last.
        steps_error_ratio: predicted over measured steps, less 1.
    """

    generation: Generation
    old_members: tuple[WorkerId, ...]
    new_members: tuple[WorkerId, ...]
    reason: str
    explanation: str
    phase: Phase
    error: str
    started_at: float
    ended_at: float | None
    finished_ratio_at_start: float
    pause_s: float
    first_step_s: float
    gap_s: float
    phases_s: dict[str, float] = field(default_factory=dict)
    moved_samples: tuple[SampleId, ...] = ()
    experts_per_worker: tuple[int, ...] = ()
    received_bytes: int = 0
    steps_before_s: tuple[float, ...] = ()
    steps_during_s: tuple[float, ...] = ()
    released: tuple[ReleasedSlot, ...] = ()
    predicted: Prediction | None = None
    measured_steps: int | None = None
    steps_error_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """``healthy`` means forward progress: no work, or a recent step (see ``detail``)."""

    healthy: bool
    detail: str
    last_step_age_s: float
    workers: int
    wanted_workers: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service must know to check a request before it is accepted."""

    path: str
    vocab_size: int
    max_model_len: int
    exact: bool
    eos_token_ids: tuple[int, ...]
    weight_version: str = "0"
    """Of the weights that new samples are decoded with."""
    routing: RoutingLayout | None = None
    """How routed experts are told; None: this model's cannot be."""


class CoordinatorPort(PausePort, Protocol):
    """The coordinator as its callers see it."""

    async def served_model(self) -> ServedModel: ...

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Accept (journal) all samples of a rollout, or none. The same id with the same
        content joins the running rollout.

        Raises: RequestError, OverloadedError, UnavailableError.
        """

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        """Raises: UnknownIdError."""

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        """Up to ``limit`` ended samples after ``cursor``; waits up to ``wait_s`` for the first."""

    async def tokens(
        self, rollout_id: RolloutId, known: tuple[int | None, ...], wait_s: float
    ) -> tuple[SampleNews, ...]:
        """Tokens and endings that the caller does not know yet; waits up to ``wait_s`` for any.

        Args:
            known: for each sample, in the order of the request, how many of its tokens the
                caller has; None for one of which nothing more is wanted.

        Raises: RequestError, UnknownIdError.
        """

    async def tokens_of(
        self, wishes: tuple[TokenWish, ...], wait_s: float
    ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
        """``tokens`` of many rollouts in one call: an answer per wish, as soon as there is any.

        None: there is nothing new yet. An error is that of its wish alone.
        """

    async def new_tokens(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> TokenBatch:
        """Tokens and endings behind ``cursor``, of up to ``limit`` reports; waits up to
        ``wait_s`` for the first. A cursor stays good for as long as the rollout is known.

        Raises: RequestError, UnknownIdError.
        """

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        """End the rollout's unfinished samples, or those of them that are named; the answer
        holds them with their partials.
        """

    async def open_rollouts(self) -> list[RolloutStatus]:
        """Those with unfinished samples, oldest first."""

    async def workers(self) -> list[WorkerStatus]: ...

    async def operations(self) -> list[OperationStatus]:
        """Oldest first; the last one may be in progress."""

    async def health(self) -> Health: ...

    async def metrics_text(self) -> bytes:
        """Prometheus exposition."""

    async def update_weights(self, update: WeightUpdate) -> WeightStatus:
        """Replace the weights of whoever is in the group, and of all who come later. Returns when
        new tokens are decoded with them; every unfinished sample goes on from where it is, its KV
        computed anew.

        Raises:
            RequestError: ``update`` is wrong (its field says where); nothing was touched.
            WeightUpdateError: it failed half-way; the version before serves on.
            UnavailableError: another update is under way, the group is in a change that does not
                end within its bound, or the service is starting.
        """

    async def weight_status(self) -> WeightStatus: ...

    async def init_weights_group(self, group: WeightsGroup) -> None:
        """Join the trainer's group; returns when all its ranks have met.

        Raises: RequestError, UnavailableError.
        """

    async def destroy_weights_group(self, name: str) -> None:
        """Raises: UnknownIdError."""

    async def shutdown(self) -> None:
        """End all workers, remove all leases. Idempotent."""
