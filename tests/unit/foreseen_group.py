"""A group in memory whose samples really end, decoded step by step under the planning rules.

Like the simulator, without its costs: to be small enough for properties of any load.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.horizon import GroupCosts
from placement.ids import SampleId, WorkerId
from placement.planner import PlannerSettings, ReleasePlanner
from placement.rebalance import RebalanceSettings
from placement.release import IdlePolicy
from placement.reserve import Reserve, ReserveTuner
from placement.views import (
    DispatchPlan,
    GroupView,
    LengthBelief,
    SampleView,
    WidthDecision,
    WorkerView,
)

PROMPT_TOKENS = 10

COSTS = GroupCosts(
    step_time=StepTimeModel(0.005, experts_s=0.02, context_token_s=1e-6, routed_ratio=0.1),
    change=ReconfigurationCost(0.5, 1e11, 1e11),
    num_experts=16,
    expert_bytes=10**8,
    kv_token_bytes=10**5,
    recompute_token_s=1e-5,
)


@dataclass
class ForeseenGroup:
    """Attributes:
    true_tokens: how long each response becomes.
    full_length: admission by full length: then nobody may ever be preempted.
    """

    true_tokens: list[int]
    beliefs: list[LengthBelief | None]
    max_tokens: int
    kv_tokens_at_width: tuple[int, ...]
    max_samples: int
    floor: int
    full_length: bool
    price: float
    generated: dict[int, int] = field(default_factory=dict)
    worker_of: dict[int, WorkerId] = field(default_factory=dict)
    steps: int = 0
    num_preempted: int = 0
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [WorkerId(i) for i in range(len(self.kv_tokens_at_width) - 1)]
        self.widths = [len(self.members)]
        self.generated = dict.fromkeys(range(len(self.true_tokens)), 0)
        tuner = ReserveTuner(Reserve(least_tokens=4, full_length=self.full_length))
        rebalance = RebalanceSettings(interval_steps=16)
        self.dispatcher = Dispatcher(DispatchSettings(rebalance=rebalance), COSTS, tuner)
        settings = PlannerSettings(price=self.price, replan_steps=8)
        self.planner = ReleasePlanner(settings, COSTS, tuner)

    def view(self) -> GroupView:
        samples = [
            SampleView(
                SampleId(f"r/{i}/0"),
                PROMPT_TOKENS + generated,
                PROMPT_TOKENS + self.max_tokens,
                i,
                self.worker_of.get(i),
                generated,
                f"p{i}",
                self.beliefs[i],
            )
            for i, generated in self.generated.items()
        ]
        capacity = self.kv_tokens_at_width[len(self.members)]
        num_ended = len(self.true_tokens) - len(samples)
        return GroupView(
            workers=tuple(WorkerView(w, self.max_samples, capacity) for w in self.members),
            running=tuple(s for s in samples if s.worker_id is not None),
            queued=tuple(s for s in samples if s.worker_id is None),
            num_experts=16,
            kv_tokens_at_width=self.kv_tokens_at_width,
            max_workers=len(self.kv_tokens_at_width) - 1,
            floor_workers=self.floor,
            any_finished=num_ended > 0,
            steps=self.steps,
            num_ended=num_ended,
            num_preempted=self.num_preempted,
            num_changes=len(self.widths) - 1,
        )

    def dispatch(self) -> DispatchPlan:
        plan = self.dispatcher(self.view())
        for binding in plan.bindings:
            sample = index_of(binding.sample_id)
            assert sample not in self.worker_of
            assert binding.worker_id in self.members
            self.worker_of[sample] = binding.worker_id
        for move in plan.moves:
            sample = index_of(move.sample_id)
            assert self.worker_of[sample] == move.source
            self.worker_of[sample] = move.destination
        self.check()
        return plan

    def decide(self) -> WidthDecision:
        decision = self.planner(self.view(), IdlePolicy.ALL)
        if decision.width < len(self.members):
            assert len(decision.leavers) == len(self.members) - decision.width
            self.members = [w for w in self.members if w not in decision.leavers]
            self.worker_of = {s: w for s, w in self.worker_of.items() if w in self.members}
            self.widths.append(decision.width)
        return decision

    def decode(self, num_steps: int = 8) -> None:
        for _ in range(num_steps):
            self.preempt()
            if not self.worker_of:
                return
            self.steps += 1
            for sample in list(self.worker_of):
                self.generated[sample] += 1
                if self.generated[sample] >= self.true_tokens[sample]:
                    del self.generated[sample], self.worker_of[sample]

    def preempt(self) -> None:
        """A worker without KV for the next step gives up the samples that came last."""
        for worker_id in self.members:
            here = sorted(s for s, w in self.worker_of.items() if w == worker_id)
            while here and self.need_tokens(here) > self.kv_tokens_at_width[len(self.members)]:
                del self.worker_of[here.pop()]
                self.num_preempted += 1

    def need_tokens(self, samples: list[int]) -> int:
        """KV for one more step."""
        return sum(PROMPT_TOKENS + self.generated[s] + 1 for s in samples)

    def check(self) -> None:
        """No worker is given more than it has."""
        for worker_id in self.members:
            here = [s for s, w in self.worker_of.items() if w == worker_id]
            assert len(here) <= self.max_samples
            context = sum(PROMPT_TOKENS + self.generated[s] for s in here)
            assert context <= self.kv_tokens_at_width[len(self.members)]

    def run(self, each_turn: Callable[[WidthDecision], None] = lambda _: None) -> None:
        for _ in range(20 * len(self.true_tokens) * self.max_tokens):
            if not self.generated:
                return
            self.dispatch()
            each_turn(self.decide())
            self.dispatch()
            self.decode()
        raise AssertionError(f"{len(self.generated)} samples are still there: {self.view()}")


def index_of(sample_id: SampleId) -> int:
    return int(sample_id.split("/")[1])


def certain(tokens: int) -> LengthBelief:
    return LengthBelief(math.log(tokens), 1e-3)


@st.composite
def foreseen_groups(draw: st.DrawFn, full_length: bool | None = None) -> ForeseenGroup:
    """Any load that a group of up to five workers can decode at all, believed in or not."""
    max_tokens = draw(st.integers(4, 60))
    num_workers = draw(st.integers(1, 5))
    longest = PROMPT_TOKENS + max_tokens
    kv = sorted(
        draw(st.lists(st.integers(0, 4 * longest), min_size=num_workers, max_size=num_workers))
    )
    kv[-1] = max(kv[-1], longest + 1)
    true_tokens = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=12))
    beliefs: st.SearchStrategy[LengthBelief | None] = st.one_of(
        st.none(), st.builds(LengthBelief, st.floats(0, 5), st.floats(0.001, 1.5))
    )
    return ForeseenGroup(
        true_tokens=true_tokens,
        beliefs=draw(st.lists(beliefs, min_size=len(true_tokens), max_size=len(true_tokens))),
        max_tokens=max_tokens,
        kv_tokens_at_width=(0, *kv),
        max_samples=draw(st.integers(1, 6)),
        floor=next(w for w, tokens in enumerate((0, *kv)) if tokens > longest),
        full_length=draw(st.booleans()) if full_length is None else full_length,
        price=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
    )


def believing_the_truth(group: ForeseenGroup) -> ForeseenGroup:
    return replace(group, beliefs=[certain(n) for n in group.true_tokens])
