"""What the coordinator and a worker say to each other.

The coordinator calls, a worker never does: it keeps what it has to tell until the
coordinator has collected *and acknowledged* it, so a coordinator that dies and comes back
loses no token.
"""

from dataclasses import dataclass, field
from typing import Any

from actors.token_detail import RoutingLayout, TokenDetail
from placement.ids import Generation, SampleId, WorkerId
from placement.samples import FinishReason


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is built from.

    Attributes:
        members: the group that it starts in or is about to join, in rank order.
        generation: number of that membership.
        joiner: it joins a live group: built alone, weights come from peers in ``prepare``.
        store_address: host and port of the rendezvous store.
        engine_args: vLLM's own options, under their own names.
        kv_memory_bytes: KV cache of a worker that holds ``ceil(num_experts / max_workers)``
            experts; each expert more or less takes or gives its bytes.
        max_workers: see there; 0 stands for ``len(members)``.
        exact: the placement-invariant combine and its checks.
        max_samples: most samples at once.
        idle_beat_s: longest wait between two control words of an idle group.
        collective_timeout_s: bound on every collective.
    """

    worker_id: WorkerId
    members: tuple[WorkerId, ...]
    generation: Generation
    joiner: bool
    store_address: tuple[str, int]
    model: str
    engine_args: dict[str, Any]
    kv_memory_bytes: int
    exact: bool
    max_samples: int
    max_workers: int = 0
    idle_beat_s: float = 0.02
    collective_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker learnt about the model while it built, and the memory it measured."""

    num_layers: int
    num_experts: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    expert_bytes: int
    """One expert in all layers."""
    kv_block_bytes: int
    """One KV block in all layers."""
    kv_block_tokens: int
    dense_bytes: int
    experts_per_token: int = 0
    """Of a layer's experts; 0: not known."""
    on_cpu: bool = False
    """It decodes on the cores of its machine, which other workers may share."""
    routing: RoutingLayout | None = None
    """How routed experts are told; None: this model's cannot be."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """``phases_s``: seconds per phase of the build (import, config, engine, warm-up, checks)."""

    worker_id: WorkerId
    facts: ModelFacts
    kv_capacity_tokens: int
    phases_s: dict[str, float]
    exact_report: dict[str, str] = field(default_factory=dict)
    """Kernel -> what was found ("invariant", or what replaced the stock kernel)."""
    node_id: str = ""
    slot: str = ""
    """The accelerator that Ray assigned ("GPU:2"), or "" where slots have no identity."""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """``phases_s``: groups, dense, experts, assemble. ``experts``: what it will own."""

    worker_id: WorkerId
    experts: tuple[int, ...]
    received_bytes: int
    phases_s: dict[str, float]
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class FinalizeReport:
    worker_id: WorkerId
    phases_s: dict[str, float]
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``resubmitted``: unfinished samples that are computed anew."""

    worker_id: WorkerId
    version: str
    received_bytes: int
    resubmitted: int
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one sample. ``start``: index of the first one in the response.

    ``logprobs`` has one entry per token, after temperature and truncation.
    """

    sample_id: SampleId
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    error: str = ""
    detail: TokenDetail | None = None
    """What the sample's ``Sampling`` asks for beside ids and logprobs."""
    weight_version: str = "0"
    """Of the weights that all of these tokens were decoded with."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The worker let go of an unfinished sample (it leaves, or was told to cancel).

    All of the sample's tokens are in events before this one.

    Attributes:
        kv_tokens: the KV of so many of its tokens can still be fetched, until the worker leaves.
    """

    sample_id: SampleId
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Switched:
    """The worker has crossed into a generation and made its first step there.

    A leaver reports it when it stands by (``first_step_s`` 0).

    Attributes:
        pause_s: end of the last old step to start of the first new one.
        phases_s: parts of the pause (agree, commit).
    """

    generation: Generation
    pause_s: float
    first_step_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The new generation failed; the worker is back in the old one.

    ``resubmitted``: samples that were recomputed because a step broke half-way.
    """

    generation: Generation
    error: str
    resubmitted: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A collective failed outside a change: the group is lost."""

    error: str


WorkerEvent = Tokens | Evicted | Switched | RolledBack | Broken


@dataclass(frozen=True, slots=True)
class StepStats:
    """Cumulative, except from ``last_step_age_s`` to ``recent_step_end_at``.

    Attributes:
        steps: lockstep steps made (idle beats do not count).
        step_s_sum: seconds in them.
        max_token_gap_s: longest time since the last collect between two tokens of this worker
            while it had unfinished samples.
        recent_step_s: the last steps' seconds, newest last (bounded).
        recent_step_end_at: the worker's wall clock at the end of each of them.
        prefilled_tokens: tokens whose KV was computed before a sample's next token.
        prefill_s: seconds that this added to the steps, beside what they usually take.
        copied_kv_bytes: KV that came with moved samples.
        copied_kv_s: seconds that filling it in took.
        refused_kv: samples whose KV came with them, did not fit and was recomputed.
        preempted: times that the engine put a sample back for want of KV.
    """

    steps: int
    step_s_sum: float
    last_step_age_s: float
    running: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    max_token_gap_s: float
    recent_step_s: tuple[float, ...]
    recent_step_end_at: tuple[float, ...] = ()
    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    copied_kv_bytes: int = 0
    copied_kv_s: float = 0.0
    refused_kv: int = 0
    preempted: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Events after the acknowledged cursor, oldest first; ``cursor`` acknowledges them all."""

    worker_id: WorkerId
    cursor: int
    events: tuple[WorkerEvent, ...]
    stats: StepStats
