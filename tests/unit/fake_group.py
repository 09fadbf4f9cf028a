"""A group in memory that carries decisions out as the coordinator would, engine left out.

It keeps its own account of experts and KV, worked out from what each worker holds and not from
the width, so that a test can hold the plans against it.
"""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from placement.dispatch import plan_dispatch
from placement.experts import check_ownership, initial_owners, plan_group_change
from placement.ids import Generation, SampleId, WorkerId
from placement.memory import MemoryBudget, floor_workers, kv_tokens_at_width
from placement.release import IdlePolicy, decide_width
from placement.views import GroupView, SampleView, WidthDecision, WorkerView


@dataclass
class FakeGroup:
    budget: MemoryBudget
    max_model_len: int
    max_samples: int
    idle_policy: IdlePolicy = IdlePolicy.ALL
    members: list[WorkerId] = field(default_factory=list)
    owner_E: tuple[WorkerId, ...] = ()
    samples: dict[SampleId, SampleView] = field(default_factory=dict)
    any_finished: bool = False
    num_arrived: int = 0
    next_worker_id: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.kv_tokens_at_width = kv_tokens_at_width(
            self.budget.num_experts,
            self.budget.max_workers,
            self.budget.expert_bytes,
            self.budget.kv_block_bytes,
            self.budget.kv_block_tokens,
            self.budget.kv_memory_bytes,
        )
        floor = floor_workers(self.kv_tokens_at_width, self.max_model_len)
        assert floor is not None
        self.floor = floor

    def found(self, width: int) -> None:
        self.members = self.new_ids(width)
        self.owner_E = initial_owners(self.budget.num_experts, self.members) if width else ()

    def new_ids(self, count: int) -> list[WorkerId]:
        ids = [WorkerId(self.next_worker_id + i) for i in range(count)]
        self.next_worker_id += count
        return ids

    def capacity_tokens(self, worker_id: WorkerId) -> int:
        """KV beside the experts that this worker really holds, in usable blocks."""
        b = self.budget
        most_when_wide = -(-b.num_experts // b.max_workers)
        extra_bytes = (self.owner_E.count(worker_id) - most_when_wide) * b.expert_bytes
        blocks = b.kv_memory_bytes // b.kv_block_bytes + (-extra_bytes) // b.kv_block_bytes
        return max(0, blocks - 1) * b.kv_block_tokens

    def view(self) -> GroupView:
        samples = tuple(self.samples.values())
        return GroupView(
            workers=tuple(
                WorkerView(w, self.max_samples, self.capacity_tokens(w)) for w in self.members
            ),
            running=tuple(s for s in samples if s.worker_id is not None),
            queued=tuple(s for s in samples if s.worker_id is None),
            num_experts=self.budget.num_experts,
            kv_tokens_at_width=self.kv_tokens_at_width,
            max_workers=self.budget.max_workers,
            floor_workers=self.floor,
            any_finished=self.any_finished,
            kv_block_tokens=self.budget.kv_block_tokens,
        )

    def arrive(self, lengths: list[tuple[int, int]]) -> None:
        """New samples of (context, full length)."""
        for context_tokens, max_context_tokens in lengths:
            sample_id = SampleId(f"r/{self.num_arrived}/0")
            self.samples[sample_id] = SampleView(
                sample_id, context_tokens, max_context_tokens, self.num_arrived
            )
            self.num_arrived += 1

    def dispatch(self) -> None:
        for binding in plan_dispatch(self.view()).bindings:
            sample = self.samples[binding.sample_id]
            self.samples[binding.sample_id] = replace(sample, worker_id=binding.worker_id)
        self.check()

    def finish(self, sample_id: SampleId) -> None:
        del self.samples[sample_id]
        self.any_finished = bool(self.samples)  # the next load begins when this one has ended

    def decide(self) -> WidthDecision:
        return decide_width(self.view(), self.idle_policy)

    def carry_out(self, decision: WidthDecision) -> None:
        """Change the membership, move what leavers had back to the queue, dispatch."""
        staying = [w for w in self.members if w not in decision.leavers]
        wanted = [*staying, *self.new_ids(decision.width - len(staying))]
        self.generation += 1
        if not wanted or not self.members:
            self.members = wanted
            if wanted:
                self.owner_E = initial_owners(self.budget.num_experts, wanted)
        else:
            change = plan_group_change(
                Generation(self.generation), self.members, wanted, self.owner_E
            )
            self.members, self.owner_E = list(change.new_members), change.owner_E
        for sample_id, sample in self.samples.items():
            if sample.worker_id in decision.leavers:
                self.samples[sample_id] = replace(sample, worker_id=None)
        self.dispatch()

    def check(self) -> None:
        """Nobody is preempted, and every expert has an owner."""
        if self.members:
            check_ownership(self.owner_E, self.members)
        block = self.budget.kv_block_tokens
        for worker_id in self.members:
            here = [s for s in self.samples.values() if s.worker_id == worker_id]
            blocks = sum(-(-s.max_context_tokens // block) for s in here)
            assert len(here) <= self.max_samples
            assert blocks * block <= self.capacity_tokens(worker_id)


@st.composite
def budgets(draw: st.DrawFn, most_workers: int = 6) -> MemoryBudget:
    """Budgets whose widest group has KV; narrow ones may have none."""
    max_workers = draw(st.sampled_from(range(most_workers, 0, -1)))
    return MemoryBudget(
        num_experts=draw(st.integers(max_workers, 20)),
        max_workers=max_workers,
        expert_bytes=draw(st.integers(0, 300)),
        kv_block_bytes=50,
        kv_block_tokens=draw(st.sampled_from([1, 4])),
        kv_memory_bytes=draw(st.integers(100, 2500)),
    )


@st.composite
def groups(draw: st.DrawFn) -> FakeGroup:
    """Founded groups of any width from the floor up, no samples yet."""
    budget = draw(budgets())
    # The longer a sample may be, the higher the floor and the less there is to decide.
    longest = max(1, budget.kv_tokens_at(budget.max_workers) // draw(st.sampled_from([1, 3])))
    group = FakeGroup(
        budget,
        max_model_len=draw(st.integers(1, longest)),
        max_samples=draw(st.integers(1, 8)),
        idle_policy=draw(st.sampled_from(IdlePolicy)),
    )
    group.found(draw(st.sampled_from(range(budget.max_workers, group.floor - 1, -1))))
    return group


@st.composite
def lengths(draw: st.DrawFn, group: FakeGroup, most: int = 20) -> list[tuple[int, int]]:
    """(context, full length) of up to ``most`` samples of a few different full lengths."""
    # Short ones leave room to consolidate; a few that are as long as they may be do not.
    longest = draw(st.sampled_from([group.max_model_len, -(-group.max_model_len // 4)]))
    full = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    count = draw(st.integers(0, most))
    pairs = st.sampled_from(full).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
    return draw(st.lists(pairs, min_size=count, max_size=count))


@st.composite
def loaded_groups(draw: st.DrawFn) -> FakeGroup:
    """Groups in mid-rollout: samples came, were dispatched, and some of them have ended."""
    group = draw(groups())
    group.arrive(draw(lengths(group)))
    group.dispatch()
    for sample in list(group.samples.values()):
        if sample.worker_id is not None and draw(st.booleans()):
            group.finish(sample.sample_id)
    group.dispatch()
    if draw(st.booleans()):
        group.arrive(draw(lengths(group, most=4)))
    return group
