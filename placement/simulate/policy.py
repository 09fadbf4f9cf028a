"""What a policy of a simulated rollout decides, and the live rules as such a policy.

Live rules look at a ``GroupView``; it is made here. Baselines read the arrays of the moment
instead (``baselines``), which is much faster and shows them no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from placement.ids import SampleId, WorkerId
from placement.release import IdlePolicy, ReleaseRule
from placement.simulate.cluster import SimulatedCluster
from placement.simulate.foresight import Foresight
from placement.simulate.samples import SampleStates
from placement.simulate.workload import Ints, Workload
from placement.views import (
    DispatchPlan,
    GroupView,
    MoveKind,
    SampleView,
    WidthDecision,
    WorkerView,
)


class Beliefs:
    """The beliefs as they were when they were last asked for: a prediction is not renewed for
    every token.

    Attributes:
        mu_N, sigma_N: the same, as arrays.
        version: another one after each renewal.
    """

    def __init__(self, foresight: Foresight, states: SampleStates) -> None:
        self._foresight = foresight
        self._states = states
        self.version = 0
        self.renew()

    def renew(self) -> None:
        running = self._states.running().tolist()
        self._foresight.refresh(running, self._states.generated_N)
        self.belief_N = self._foresight.beliefs()
        self.mu_N, self.sigma_N = np.array([(b.mu, b.sigma) for b in self.belief_N]).T
        self.version += 1


@dataclass(frozen=True, eq=False)
class Moment:
    """A simulated rollout as a policy finds it."""

    cluster: SimulatedCluster
    workload: Workload
    states: SampleStates
    beliefs: Beliefs
    members: tuple[WorkerId, ...]
    floor_workers: int
    steps: int
    num_ended: int
    num_preempted: int
    num_changes: int

    @property
    def kv_capacity_tokens(self) -> int:
        return self.cluster.kv_tokens_at_width[len(self.members)]


@dataclass(frozen=True, slots=True)
class SampleMove:
    sample: int
    source: WorkerId
    destination: WorkerId
    by: MoveKind


@dataclass(frozen=True, slots=True)
class Orders:
    """Bindings as (sample, worker), and moves of running samples."""

    bindings: Sequence[tuple[int, WorkerId]]
    moves: Sequence[SampleMove] = ()


class Policy(Protocol):
    """Attributes:
    start_width: workers that are leased at first; None for all.
    """

    name: str
    start_width: int | None

    def dispatch(self, moment: Moment) -> Orders: ...

    def decide_width(self, moment: Moment) -> WidthDecision | None:
        """None: there is nothing to decide."""


class LivePolicy:
    """The live coordinator's rules, called with the views that it would make."""

    start_width: int | None = None

    def __init__(
        self,
        name: str,
        dispatch_rule: Callable[[GroupView], DispatchPlan],
        release_rule: ReleaseRule,
    ) -> None:
        self.name = name
        self._dispatch_rule = dispatch_rule
        self._release_rule = release_rule
        self._waiting: dict[int, SampleView] = {}
        self._seen: tuple[Moment, GroupView] | None = None
        self._version = -1
        self._index: dict[SampleId, int] = {}
        self._id_N: list[SampleId] = []
        self._key_N: list[str] = []

    def dispatch(self, moment: Moment) -> Orders:
        plan = self._dispatch_rule(self.view(moment))
        index = self._index
        return Orders(
            [(index[b.sample_id], b.worker_id) for b in plan.bindings],
            [SampleMove(index[m.sample_id], m.source, m.destination, m.by) for m in plan.moves],
        )

    def decide_width(self, moment: Moment) -> WidthDecision | None:
        return self._release_rule(self.view(moment), IdlePolicy.ALL)

    def view(self, moment: Moment) -> GroupView:
        """Made once for a moment that both rules look at."""
        if self._seen is None or self._seen[0] is not moment:
            self._seen = (moment, self._make_view(moment))
        return self._seen[1]

    def _make_view(self, moment: Moment) -> GroupView:
        self._prepare(moment)
        states, capacity_tokens = moment.states, moment.kv_capacity_tokens
        return GroupView(
            workers=tuple(
                WorkerView(worker_id, moment.cluster.max_samples, capacity_tokens)
                for worker_id in moment.members
            ),
            running=tuple(self._sample_views(moment, states.running())),
            queued=tuple(self._waiting_views(moment)),
            num_experts=moment.cluster.num_experts,
            kv_tokens_at_width=moment.cluster.kv_tokens_at_width,
            max_workers=moment.cluster.num_workers,
            floor_workers=moment.floor_workers,
            any_finished=moment.num_ended > 0,
            kv_block_tokens=moment.cluster.kv_block_tokens,
            steps=moment.steps,
            num_ended=moment.num_ended,
            num_preempted=moment.num_preempted,
            num_changes=moment.num_changes,
        )

    def _prepare(self, moment: Moment) -> None:
        if not self._id_N:
            workload = moment.workload
            self._id_N = [SampleId(f"simulated/{i}") for i in range(len(workload))]
            self._index = {sample_id: i for i, sample_id in enumerate(self._id_N)}
            self._key_N = [workload.prompt_key(i) for i in range(len(workload))]

    def _waiting_views(self, moment: Moment) -> list[SampleView]:
        """A waiting sample's view is made once, unless it has run, or something else is believed
        of it."""
        queued, waiting = moment.states.queued().tolist(), self._waiting
        if self._version != moment.beliefs.version:
            self._version = moment.beliefs.version
            waiting.clear()
        generated = moment.states.generated_N[queued].tolist()
        fresh = [
            i
            for i, tokens in zip(queued, generated, strict=True)
            if i not in waiting or waiting[i].generated_tokens != tokens
        ]
        views = self._sample_views(moment, np.array(fresh, np.int64))
        waiting.update(zip(fresh, views, strict=True))
        return [waiting[i] for i in queued]

    def _sample_views(self, moment: Moment, samples: Ints) -> list[SampleView]:
        states, longest = moment.states, moment.workload.max_response_tokens
        prompts = moment.workload.prompt_tokens_N[samples].tolist()
        rows = zip(
            samples.tolist(),
            prompts,
            states.generated_N[samples].tolist(),
            states.worker_N[samples].tolist(),
            strict=True,
        )
        ids, keys, beliefs = self._id_N, self._key_N, moment.beliefs.belief_N
        return [
            SampleView(
                ids[i],
                prompt + generated,
                prompt + longest,
                i,
                WorkerId(worker) if worker >= 0 else None,
                generated,
                keys[i],
                beliefs[i],
            )
            for i, prompt, generated, worker in rows
        ]
