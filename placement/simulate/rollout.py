"""One rollout in virtual time, from the first lease to the last sample's end.

The loop is the coordinator's: bind queued samples, see to the group's width, decode. Decoding
skips ahead: between two decisions nothing happens but steps, ends of samples and a worker that
runs out of KV, and all steps of such a stretch are computed at once (``samples``).

A step costs what the cost model says for the mean batch and the largest context, times the
slowest member's factor. A change of the group holds decoding up for its whole cost, while the
old group is occupied: nothing is hidden behind decoding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from placement.errors import PlanError
from placement.ids import WorkerId
from placement.simulate.cluster import Misfortunes, SimulatedCluster
from placement.simulate.foresight import Foresight
from placement.simulate.group import SimulatedGroup
from placement.simulate.history import History
from placement.simulate.outcome import Outcome, WidthChange
from placement.simulate.policy import Beliefs, Moment, Orders, Policy
from placement.simulate.samples import QUEUED, SampleStates, Stretch, look_ahead, take
from placement.simulate.workload import Workload
from placement.views import MoveKind, WidthDecision

ENDS_PER_DECISION_RATIO = 0.02  # of the running samples; a coordinator binds in batches too
MOST_STEPS = 512
LEAST_STEPS = 16
STEPS_WITHOUT_QUEUE = 128
RENEWALS = 24  # beliefs are renewed each time another 1/24 of the samples have ended, ...
STEPS_PER_RENEWAL = 2048  # ... or after so many steps
NO_MISFORTUNES = Misfortunes()


def simulate(
    cluster: SimulatedCluster,
    workload: Workload,
    policy: Policy,
    foresight: Foresight,
    misfortunes: Misfortunes = NO_MISFORTUNES,
    history: History | None = None,
) -> Outcome:
    """Args:
        history: is told what happens on each slot.

    Raises:
        PlanError: the policy leaves samples waiting with nobody decoding, or breaks an invariant;
            or too few leases are there at the start.
    """
    return _Rollout(cluster, workload, policy, foresight, misfortunes, history).run()


class _Rollout:
    def __init__(
        self,
        cluster: SimulatedCluster,
        workload: Workload,
        policy: Policy,
        foresight: Foresight,
        misfortunes: Misfortunes,
        history: History | None,
    ) -> None:
        self._history = history
        self._cluster, self._workload, self._policy = cluster, workload, policy
        self._foresight, self._misfortunes = foresight, misfortunes
        self._floor = cluster.floor(workload.max_context_tokens)
        self._states = SampleStates(workload)
        self._beliefs = Beliefs(foresight, self._states)
        width = policy.start_width or cluster.num_workers
        if not self._floor <= width <= cluster.num_workers:
            raise PlanError(
                f"is {width}; it must be between the floor {self._floor} and {cluster.num_workers}",
                field="start_width",
            )
        self._late = sorted((at_s, slot) for slot, at_s in misfortunes.late_s.items())
        there = [slot for slot in range(width) if slot not in misfortunes.late_s]
        if len(there) < self._floor:
            raise PlanError(
                f"leaves {len(there)} workers at the start, and the floor is {self._floor}; let "
                "fewer leases come late",
                field="misfortunes.late",
            )
        self._deaths = sorted(misfortunes.deaths_s)
        self._group = SimulatedGroup(there, cluster.num_workers, cluster.num_experts, 0.0)
        self._now_s = 0.0
        self._steps = self._worker_steps = self._ended = 0
        self._renewed_ended = self._renewed_steps = 0
        self._idle_worker_s = self._prefill_s = self._changing_s = 0.0
        self._preempted_tokens = self._preemptions = self._moves = 0
        self._restarts = self._unplaced = 0
        self._has_kv: set[int] = set()  # moved with their KV: not to be computed again
        self._changes: list[WidthChange] = []
        self._may_bind = True
        self._unchanged: Moment | None = None  # as the dispatcher saw it and left it

    def run(self) -> Outcome:
        while self._ended < len(self._workload):
            self._meet_deaths()
            self._renew_beliefs()
            self._bind_queued()
            self._see_to_width()
            self._bind_queued()
            self._decode()
        occupations = self._group.end(self._now_s)
        return Outcome(
            policy=self._policy.name,
            num_samples=len(self._workload),
            total_tokens=self._workload.total_tokens,
            span_s=self._now_s,
            steps=self._steps,
            occupied_worker_s=sum(o.until_s - o.from_s for o in occupations),
            worker_steps=self._worker_steps,
            idle_worker_s=self._idle_worker_s,
            prefill_s=self._prefill_s,
            changing_s=self._changing_s,
            preempted_tokens=self._preempted_tokens,
            num_preemptions=self._preemptions,
            num_moves=self._moves,
            restarts=self._restarts,
            unplaced=self._unplaced,
            changes=tuple(replace(c, steps_after=self._steps - c.step) for c in self._changes),
            occupations=occupations,
        )

    def _moment(self) -> Moment:
        return Moment(
            self._cluster,
            self._workload,
            self._states,
            self._beliefs,
            self._group.members,
            self._floor,
            self._steps,
            self._ended,
            self._preemptions,
            len(self._changes),
        )

    def _renew_beliefs(self) -> None:
        ended = (self._ended - self._renewed_ended) * RENEWALS >= len(self._workload)
        if ended or self._steps - self._renewed_steps >= STEPS_PER_RENEWAL:
            self._beliefs.renew()
            self._renewed_ended, self._renewed_steps = self._ended, self._steps

    # Samples to workers

    def _bind_queued(self) -> None:
        if not self._may_bind:
            return
        self._may_bind = False
        moment = self._moment()
        orders = self._policy.dispatch(moment)
        if not (orders.bindings or orders.moves):
            self._unchanged = moment
            return
        self._unchanged = None
        states, cluster = self._states, self._cluster
        prefill: dict[WorkerId, int] = dict.fromkeys(self._group.members, 0)
        for sample, worker_id in orders.bindings:
            states.bind(sample, worker_id)
            if sample in self._has_kv:
                self._has_kv.discard(sample)
            else:
                prefill[worker_id] += int(states.context_tokens_N[sample])
        self._move(orders, prefill)
        self._check_memory()
        took_s = max(prefill.values()) * cluster.prefill_token_s
        if self._history is not None and took_s:
            with_samples = set(states.worker_N[states.running()].tolist())
            slots = [self._group.slot_of[w] for w in self._group.members if w in with_samples]
            self._history.prefilled(self._now_s, self._now_s + took_s, slots)
        self._prefill_s += took_s
        self._now_s += took_s

    def _move(self, orders: Orders, prefill: dict[WorkerId, int]) -> None:
        """Carry moves out; those that copy KV wait for the busiest link."""
        copied: dict[WorkerId, int] = dict.fromkeys(self._group.members, 0)
        for move in orders.moves:
            if self._states.worker_N[move.sample] != move.source:
                raise PlanError(
                    f"sample {move.sample} is to move from worker {move.source}, but it is on "
                    f"{self._states.worker_N[move.sample]}"
                )
            context = int(self._states.context_tokens_N[move.sample])
            self._states.worker_N[move.sample] = move.destination
            if move.by is MoveKind.COPY:
                copied[move.source] += context
                copied[move.destination] += context
            else:
                prefill[move.destination] += context
        self._moves += len(orders.moves)
        rate = self._cluster.reconfiguration.kv_bytes_per_s
        self._now_s += max(copied.values()) * self._cluster.kv_token_bytes / rate

    def _check_memory(self) -> None:
        """A plan never asks for more than there is."""
        states, moment = self._states, self._moment()
        running = states.running()
        worker_R, context_R = states.worker_N[running], states.context_tokens_N[running]
        for worker_id in self._group.members:
            here = worker_R == worker_id
            if context_R[here].sum() > moment.kv_capacity_tokens:
                raise PlanError(
                    f"worker {worker_id} was given {context_R[here].sum()} tokens of KV; it has "
                    f"{moment.kv_capacity_tokens}"
                )
            if np.count_nonzero(here) > self._cluster.max_samples:
                raise PlanError(
                    f"worker {worker_id} was given {np.count_nonzero(here)} samples; it decodes "
                    f"{self._cluster.max_samples} at once"
                )

    # The width

    def _see_to_width(self) -> None:
        arrived = [slot for at_s, slot in self._late if at_s <= self._now_s]
        if self._states.queued().size and not arrived:
            return  # nobody leaves while samples wait, and nobody is there to join
        decision = self._policy.decide_width(self._unchanged or self._moment())
        if decision is None or decision.width == self._group.width:
            return
        joining = arrived[: max(0, decision.width - self._group.width)]
        if joining or decision.leavers:
            self._change(decision, joining)
            self._late = [(at_s, slot) for at_s, slot in self._late if slot not in joining]

    def _change(self, decision: WidthDecision, joining: Sequence[int]) -> None:
        cluster, group, states = self._cluster, self._group, self._states
        change = group.plan(decision.leavers, joining)
        width = len(change.new_members)
        moved = [s for w in change.leavers for s in np.flatnonzero(states.worker_N == w).tolist()]
        moved_tokens = int(states.context_tokens_N[moved].sum())
        expert_bytes = len(change.moves) * cluster.expert_bytes
        kv_bytes = moved_tokens * cluster.kv_token_bytes
        copy_s = cluster.reconfiguration.seconds(group.width, width, expert_bytes, kv_bytes)
        alone_s = cluster.reconfiguration.seconds(group.width, width, expert_bytes, 0)
        if copy_s - alone_s <= moved_tokens * cluster.prefill_token_s / width:
            took_s = copy_s
            self._has_kv.update(moved)
        else:
            took_s = alone_s  # their context is computed again where they go
        states.worker_N[moved] = QUEUED
        self._changes.append(
            WidthChange(
                self._steps,
                self._now_s,
                self._now_s + took_s,
                group.width,
                width,
                decision.reason,
                decision.explanation,
                len(moved),
                expert_bytes,
                kv_bytes if took_s == copy_s else 0,
                decision.predicted,
            )
        )
        group.carry_out(change, joining, self._now_s, self._now_s + took_s)
        self._now_s += took_s
        self._changing_s += took_s
        self._moves += len(moved)
        self._may_bind = True
        if change.leavers:
            self._bind_queued()
            self._unplaced += states.queued().size

    # Steps

    def _decode(self) -> None:
        states, self._unchanged = self._states, None
        running, queued = states.running(), states.queued()
        if not running.size:
            raise PlanError(
                f"policy {self._policy.name} leaves {queued.size} samples waiting on "
                f"{self._group.width} idle workers"
            )
        most_steps = self._until_decision(bool(queued.size))
        stretch = look_ahead(
            states, self._group.ids(), self._moment().kv_capacity_tokens, most_steps
        )
        if stretch.num_steps:
            self._take(stretch)
        for position in stretch.full:
            self._preempt(self._group.members[position])
        if not queued.size:
            self._may_bind = True  # nothing to bind, but the load may have to be evened out

    def _until_decision(self, queued: bool) -> int:
        if not queued:
            return STEPS_WITHOUT_QUEUE
        states = self._states
        running = states.running()
        left = self._workload.response_tokens_N[running] - states.generated_N[running]
        ends = max(1, int(len(left) * ENDS_PER_DECISION_RATIO))
        steps = int(np.partition(left, ends - 1)[ends - 1])
        return min(max(steps, LEAST_STEPS), MOST_STEPS)

    def _take(self, stretch: Stretch) -> None:
        width = self._group.width
        slowest = max(
            self._misfortunes.slow.get(self._group.slot_of[w], 1.0) for w in self._group.members
        )
        step_J = slowest * self._cluster.step_time.steps_s(
            width, stretch.batch_WJ.mean(axis=0), stretch.context_WJ.max(axis=0)
        )
        if self._history is not None:
            ended = stretch.ended
            left = self._workload.response_tokens_N[ended] - self._states.generated_N[ended]
            slots = [self._group.slot_of[w] for w in self._group.members]
            self._history.decoded(self._now_s, slots, stretch.batch_WJ, step_J, left)
        take(self._states, stretch)
        for sample in stretch.ended.tolist():
            self._foresight.observe(sample, int(self._workload.response_tokens_N[sample]))
        self._now_s += float(step_J.sum())
        self._idle_worker_s += float(((stretch.batch_WJ == 0).sum(axis=0) * step_J).sum())
        self._steps += stretch.num_steps
        self._worker_steps += stretch.num_steps * width
        self._ended += len(stretch.ended)
        self._may_bind = self._may_bind or bool(len(stretch.ended))

    def _preempt(self, worker_id: WorkerId) -> None:
        taken = self._states.preempt_from(worker_id, self._moment().kv_capacity_tokens)
        self._preemptions += len(taken)
        self._preempted_tokens += int(self._states.context_tokens_N[taken].sum())
        self._may_bind = True

    def _meet_deaths(self) -> None:
        while self._deaths and self._deaths[0] <= self._now_s:
            self._deaths.pop(0)
            running = self._states.running()
            self._states.worker_N[running] = QUEUED
            self._has_kv.clear()
            ready_s = self._now_s + self._misfortunes.restart_s
            self._group.found_again(self._now_s, ready_s)
            self._now_s = ready_s
            self._restarts += 1
            self._may_bind = True
