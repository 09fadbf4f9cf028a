"""Settings of everything below the HTTP service. ``deploy.config`` puts them into one tree.

Validators check and never change a value.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(Settings):
    """The model, and how vLLM is to run it."""

    path: str
    """Directory of a Hugging Face checkpoint (the published source of the weights)."""
    max_model_len: int = Field(default=4096, ge=2)
    """Most tokens of a sample, prompt included."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of weights and activations."""
    exact: bool = False
    """Exact mode: tokens and logprobs do not depend on placement, releases or moves. It moves
    top-k times the bytes of the usual combine; it refuses to start where a kernel cannot
    promise it, which today is every GPU."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """More options of vLLM's ``EngineArgs``, under their own names."""


class GroupSettings(Settings):
    """The elastic expert-parallel group."""

    max_workers: int = Field(default=4, ge=1, le=4096)
    """Most workers, and the number that the service starts with."""
    min_workers: int = Field(default=1, ge=1)
    """The group never gets smaller, unless it is given up altogether."""
    max_samples_per_worker: int = Field(default=16, ge=1)
    """Most samples that one worker decodes at once."""
    kv_memory_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """KV cache of a worker while the group has ``max_workers``. A smaller group holds more
    experts per worker and gives KV up for them."""
    idle_workers: Literal["none", "floor", "all"] = "all"
    """How many workers stay when nothing is left to decode."""
    move_samples_by: Literal["recompute", "copy", "auto"] = "recompute"
    """How a leaver's unfinished samples get their KV at their next worker: computed anew from
    their tokens, copied from the leaver, or ("auto") whichever is expected to be faster by what
    was measured on these workers. Computing it lengthens a step of the whole group, copying only
    delays the sample. On the tiny model of the demo a copy is slower at 128 tokens of context and
    takes less than half the time at 900 (benchmarks/results/move_cost.json), so the default is
    what needs nobody else."""
    idle_beat_s: float = Field(default=0.02, gt=0, le=1)
    """Longest wait between two control words of an idle group: the latency with which an idle
    group notices new work, against the CPU that waiting costs."""
    collective_timeout_s: float = Field(default=30, gt=0)
    """Bound on every collective; a peer that hangs longer is given up."""
    build_timeout_s: float = Field(default=300, gt=0)
    """Bound on the start of a worker's engine."""
    prepare_timeout_s: float = Field(default=60, gt=0)
    """Bound on the preparation of a change."""
    switch_timeout_s: float = Field(default=60, gt=0)
    """Bound from the request to cross over until every member has made its first step."""
    weights_timeout_s: float = Field(default=600, gt=0)
    """Bound on each part of an update of the weights: on a trainer's group that meets or one of
    its broadcasts, on reading or making what is new, and on loading it on all workers."""
    leave_timeout_s: float = Field(default=20, gt=0)
    """Bound on a worker's orderly exit; then it is killed."""


class LeaseSettings(Settings):
    """What one worker leases from the Ray cluster."""

    resources: dict[str, float] = Field(default_factory=lambda: {"GPU": 1.0})
    """Ray resources of a worker's bundle."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that the bundle's node must have."""
    acquire_timeout_s: float = Field(default=60, gt=0)
    """How long a rollout waits for more than the floor, and a start for the floor."""
    usage_poll_s: float = Field(default=0.25, gt=0)
    """How often Ray is asked who holds the slots: the resolution of "used" time."""


class CoordinatorSettings(Settings):
    """Bounds of the coordinator."""

    max_open_samples: int = Field(default=65536, ge=1)
    """Most samples that are accepted and not yet ended; more are answered with 429."""
    max_kept_rollouts: int = Field(default=64, ge=1)
    """Ended rollouts that can still be asked for; the oldest is forgotten first."""
    keep_ended_s: float = Field(default=30, ge=0)
    """Least time for which an ended rollout can be asked for, however many have ended since:
    long enough for every client that follows one to fetch its end."""
    journal_dir: str = ""
    """Directory in which accepted rollouts, with every token that was told, outlive the
    coordinator; empty: they end with it. One runtime writes it. It is on whichever node the
    coordinator runs on, so where a restart may come up on another one, or in another pod, it has to
    be a volume that both mount."""
    journal_max_bytes: int = Field(default=4 << 30, ge=64 << 20)
    """How large the journal may become: beyond it ended rollouts are forgotten, then new ones are
    answered with 429. What was accepted before is written all the same."""
    max_kept_operations: int = Field(default=256, ge=1)
    """Membership changes that can still be asked for."""
    collect_wait_s: float = Field(default=1.0, gt=0)
    """Bound of one long poll for a worker's events."""
    min_reconfigure_interval_s: float = Field(default=0.5, ge=0)
    """Least time between the end of one change and the start of the next."""
    reaper_timeout_s: float = Field(default=60, gt=0)
    """If no coordinator has been seen for so long, the store's reaper ends the workers and
    removes the leases."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources that coordinator, store and HTTP replica hold, each. A resource that only
    some nodes have keeps them there, off nodes that come and go with the load."""


class PlanningSettings(Settings):
    """Who decodes what, and who leaves when (``docs/planning.md``)."""

    policy: Literal["first_rule", "planner"] = "planner"
    """"first_rule" knows no lengths: samples start in arrival order, and workers leave as soon as
    the others have room for every running sample's full length. "planner" predicts lengths,
    starts the longest first, and releases when that pays at the price."""
    price: float = Field(default=0.5, ge=0, le=1)
    """Of a freed worker-second, between 0 (only the makespan counts) and 1 (only what is
    occupied does)."""
    max_slowdown_ratio: float | None = Field(default=None, ge=0)
    """If set, the price is not used: as much is freed as possible while a load takes at most
    this share longer than without any release."""
    unit: Literal["auto", "seconds", "steps"] = "auto"
    """What the planner counts in. Where several workers share cores, a narrow group is faster
    only because fewer processes compete; "steps" charges every step alike, whatever the width.
    "auto" counts steps where the engine runs on CPUs, and seconds on accelerators."""
    replan_steps: int = Field(default=256, ge=1)
    """Least steps between two plans, unless a worker idles or the group has changed."""
    max_changes: int = Field(default=8, ge=1)
    """Most releases while one load lasts."""
    known_lengths: bool = False
    """Replays only: decide with the lengths that are replayed, which no real rollout could know.
    It shows what decisions are worth by themselves, and how far predictions err by lengths."""
    rebalance: bool = False
    """Move running samples between workers that stay, where one reads much more KV than the
    others. Each move costs its sample a few steps and pays only where reading KV makes up much of
    a step; on the tiny model of the demo it does not. Where steps are counted none is made."""
    rebalance_steps: int = Field(default=512, ge=1)
    """Least steps between two looks at how even the load is; twice as many is how soon moves have
    to have paid."""
    length_history: str = ""
    """File in which what was learned about lengths outlives the service; empty: it does not. It
    is written by whichever node the coordinator runs on."""


class RuntimeSettings(Settings):
    """All of the above: what the coordinator is made from."""

    model: ModelSettings
    group: GroupSettings = GroupSettings()
    lease: LeaseSettings = LeaseSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    planning: PlanningSettings = PlanningSettings()
    namespace: str = "flexfloor"
    """Ray namespace of all our actors."""
