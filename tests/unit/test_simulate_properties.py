"""What holds over whole rollouts, whatever the batch, the machine and the misfortunes.

The simulator decides with the live rules, so these are their properties. A watcher stands between
rollout and rules and sees every moment and every decision.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.experts import initial_owners, plan_group_change
from placement.ids import Generation, WorkerId
from placement.planner import PlannerSettings, ReleasePlanner
from placement.rebalance import RebalanceSettings
from placement.reserve import Reserve, ReserveTuner
from placement.simulate.cluster import Misfortunes, SimulatedCluster
from placement.simulate.contest import costs_of
from placement.simulate.foresight import PredictedLengths, TrueLengths
from placement.simulate.outcome import Outcome
from placement.simulate.policy import LivePolicy, Moment, Orders, Policy
from placement.simulate.rollout import simulate
from placement.simulate.workload import Workload
from placement.views import WidthDecision
from tests.unit.simulated import cluster, workload

LIMIT_TOKENS = 2000
MOST_CHANGES = 3


@dataclass(frozen=True)
class Case:
    machine: SimulatedCluster
    believed: SimulatedCluster
    work: Workload
    knows_lengths: bool
    planning: PlannerSettings
    misfortunes: Misfortunes

    def rules(self) -> LivePolicy:
        costs, tuner = costs_of(self.believed), ReserveTuner(Reserve(least_tokens=32))
        rebalance = RebalanceSettings(interval_steps=64, gain_ratio=1.0)
        return LivePolicy(
            "ours",
            Dispatcher(DispatchSettings(rebalance), costs, tuner),
            ReleasePlanner(self.planning, costs, tuner),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches that queue or do not, costs that are believed rightly or wrongly, and fate."""
    num_workers = draw(st.sampled_from([4, 6, 3, 1]))
    full_tokens = LIMIT_TOKENS + 80
    machine = cluster(
        num_workers,
        kv_tokens=full_tokens * draw(st.sampled_from([16, 4, 2, 1])) + draw(st.integers(0, 2000)),
        max_samples=draw(st.sampled_from([64, 16, 4])),
    )
    block_tokens = machine.kv_block_tokens
    whole_blocks = tuple(n // block_tokens * block_tokens for n in machine.kv_tokens_at_width)
    machine = replace(
        machine,
        kv_tokens_at_width=whole_blocks,
        reconfiguration=ReconfigurationCost(draw(st.sampled_from([0.001, 0.5])), 1e9, 1e9),
    )
    work = workload(
        draw(st.sampled_from([40, 80, 12, 1])),
        seed=draw(st.integers(0, 1000)),
        limit=LIMIT_TOKENS,
        median=draw(st.sampled_from([400.0, 100.0, 1500.0])),
    )
    believed = machine
    if draw(st.booleans()):
        wrong = StepTimeModel(*draw(st.tuples(*[st.floats(1e-6, 0.05)] * 3)))
        believed = replace(machine, step_time=wrong)
    slots = st.integers(0, num_workers - 1)
    floor = machine.floor(work.max_context_tokens)
    late = draw(st.dictionaries(slots, st.floats(0.1, 60), max_size=num_workers - floor))
    return Case(
        machine,
        believed,
        work,
        draw(st.booleans()),
        PlannerSettings(
            price=draw(st.sampled_from([1.0, 0.9, 0.5, 0.0])),
            max_slowdown_ratio=draw(st.sampled_from([None, None, 0.0, 0.1])),
            replan_steps=draw(st.sampled_from([16, 64])),
            max_changes=MOST_CHANGES,
            least_ended_ratio=draw(st.sampled_from([0.2, 0.0])),
        ),
        Misfortunes(
            slow=draw(st.dictionaries(slots, st.floats(1, 4), max_size=2)),
            late_s=late,
            deaths_s=draw(st.sampled_from([(), (), (2.0,), (1.0, 20.0)])),
            restart_s=draw(st.floats(0, 60)),
        ),
    )


def check_decision(moment: Moment, decision: WidthDecision) -> None:
    """Nobody leaves who is needed, and nobody is called who is not."""
    states, now = moment.states, len(moment.members)
    queued = states.queued()
    if decision.width > now:
        unstarted = queued.size and not states.generated_N[queued].all()
        nobody_runs = not states.running().size
        assert unstarted or nobody_runs, "the group is to grow for samples that it had already"
        assert decision.width <= moment.cluster.num_workers
    if decision.width < now:
        assert not queued.size, "somebody leaves while samples wait"
        assert moment.num_changes < MOST_CHANGES, "one change too many"
        assert decision.width >= moment.floor_workers
        assert len(set(decision.leavers)) == now - decision.width
        assert set(decision.leavers) < set(moment.members)
        running = states.running()
        capacity_tokens = moment.cluster.kv_tokens_at_width[decision.width]
        assert len(running) <= decision.width * moment.cluster.max_samples
        assert states.context_tokens_N[running].sum() <= decision.width * capacity_tokens


@dataclass
class Watcher:
    """A policy that asks another one and checks every moment that it is shown.

    Attributes:
        beside: the same rules once more, which are asked at every moment and not obeyed.
        widths: of each group that there was, in order.
    """

    inner: Policy
    beside: Policy
    owner_E: tuple[WorkerId, ...] = ()
    members: tuple[WorkerId, ...] = ()
    widths: list[int] = field(default_factory=list)
    decisions: list[WidthDecision] = field(default_factory=list)
    started: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name, self.start_width = self.inner.name, self.inner.start_width

    def dispatch(self, moment: Moment) -> Orders:
        self.see(moment)
        orders = self.inner.dispatch(moment)
        bound = [sample for sample, _ in orders.bindings]
        assert len(set(bound)) == len(bound)
        assert set(bound) <= set(moment.states.queued().tolist())
        self.started.update(bound)
        if set(moment.states.queued().tolist()).difference(bound):
            states = moment.states
            busy = set(states.worker_N[states.running()].tolist())
            busy |= {worker_id for _, worker_id in orders.bindings}
            assert busy == set(moment.members), "somebody waits, and a worker has nothing to do"
        return orders

    def decide_width(self, moment: Moment) -> WidthDecision | None:
        self.see(moment)
        decision = self.inner.decide_width(moment)
        assert decision is not None
        self.decisions.append(decision)
        check_decision(moment, decision)
        return decision

    def see(self, moment: Moment) -> None:
        asked = self.beside.decide_width(moment)
        assert asked is not None
        check_decision(moment, asked)
        self._check_experts(moment)
        assert moment.floor_workers <= len(moment.members) <= moment.cluster.num_workers
        states = moment.states
        running = states.running()
        on = Counter(states.worker_N[running].tolist())
        context = np.bincount(
            states.worker_N[running], states.context_tokens_N[running], max(moment.members) + 1
        )
        assert set(on) <= set(moment.members)
        assert max(on.values(), default=0) <= moment.cluster.max_samples
        assert context.max() <= moment.kv_capacity_tokens

    def _check_experts(self, moment: Moment) -> None:
        """Owners, as they follow from the members alone: each expert has one, always, and only
        an owner hands one over."""
        members, num_experts = moment.members, moment.cluster.num_experts
        if members == self.members:
            return
        if set(members) & set(self.members):
            generation = Generation(len(self.widths))
            change = plan_group_change(generation, self.members, members, self.owner_E)
            owners = list(self.owner_E)
            for move in change.moves:
                assert owners[move.expert] == move.source, "two hand the same expert over"
                owners[move.expert] = move.destination
            assert tuple(owners) == change.owner_E
            self.owner_E = change.owner_E
        else:  # the first group, or one that was founded again
            self.owner_E = initial_owners(num_experts, members)
        assert len(self.owner_E) == num_experts
        assert set(self.owner_E) == set(members)
        self.members = members
        self.widths.append(len(members))


def play(case: Case) -> tuple[Outcome, Watcher]:
    foresight = (TrueLengths if case.knows_lengths else PredictedLengths)(case.work)
    watcher = Watcher(case.rules(), case.rules())
    outcome = simulate(case.machine, case.work, watcher, foresight, case.misfortunes)
    return outcome, watcher


@given(cases())
@settings(max_examples=60, deadline=None)
def test_memory_floor_and_owners_hold_at_every_moment_and_nobody_starves(case: Case) -> None:
    outcome, watcher = play(case)
    assert outcome.total_tokens == int(case.work.response_tokens_N.sum())
    assert watcher.started == set(range(len(case.work)))
    # In every step somebody makes a token that nobody has made before.
    assert case.work.longest_tokens <= outcome.steps <= outcome.total_tokens
    assert outcome.unplaced == 0


@given(cases())
@settings(max_examples=40, deadline=None)
def test_the_width_rises_before_it_falls_and_changes_only_so_often(case: Case) -> None:
    _, watcher = play(case)
    # Leases that come late, or a new group, may widen it; without them it only falls.
    steps = [(old, new) for old, new in pairwise(watcher.widths) if old != new]
    falls = [new < old for old, new in steps]
    if not case.misfortunes.late_s:
        assert all(falls), watcher.widths
    if not case.misfortunes.deaths_s:
        assert falls == sorted(falls), watcher.widths
    assert sum(falls) <= MOST_CHANGES
    assert len(steps) <= 2 * case.machine.num_workers


@given(cases())
@settings(max_examples=25, deadline=None)
def test_the_same_batch_is_decided_in_the_same_way(case: Case) -> None:
    (first, one), (second, other) = play(case), play(case)
    assert first == second
    assert one.decisions == other.decisions


@given(cases(), st.floats(1.5, 4))
@settings(max_examples=15, deadline=None)
def test_a_slow_machine_changes_the_time_and_never_what_is_decoded(
    case: Case, factor: float
) -> None:
    calm = replace(case, misfortunes=Misfortunes())
    every_slot = dict.fromkeys(range(case.machine.num_workers), factor)
    slow = replace(case, misfortunes=Misfortunes(slow=every_slot))
    (even, _), (slowed, _) = play(calm), play(slow)
    assert slowed.steps == even.steps
    assert slowed.total_tokens == even.total_tokens
    decoding_s = even.span_s - even.prefill_s - even.changing_s
    assert slowed.span_s >= even.span_s + (factor - 1) * decoding_s * 0.5
