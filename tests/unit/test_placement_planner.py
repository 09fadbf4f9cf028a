from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cost import TimeUnit
from placement.errors import PlanError
from placement.horizon import GroupCosts
from placement.ids import WorkerId
from placement.planner import PlannerSettings, ReleasePlanner
from placement.views import GroupView, WidthDecision, WidthReason
from tests.unit.foreseen_group import COSTS, ForeseenGroup, certain, foreseen_groups

STEPS = GroupCosts(
    replace(COSTS.step_time, unit=TimeUnit.STEPS), replace(COSTS.change, unit=TimeUnit.STEPS)
)


def tail(num_ended: int = 4, **changes: object) -> ForeseenGroup:
    """Eight samples on eight workers, one of them very long, after some have ended."""
    true_tokens = [300] * 7 + [20_000] + [10] * num_ended
    group = ForeseenGroup(
        true_tokens=true_tokens,
        beliefs=[certain(n) for n in true_tokens],
        max_tokens=30_000,
        kv_tokens_at_width=(0, 0, *[200_000] * 7),
        max_samples=8,
        floor=2,
        full_length=False,
        price=0.8,
    )
    for name, value in changes.items():
        setattr(group, name, value)
    group.generated = dict.fromkeys(range(8), 0)
    group.worker_of = {i: WorkerId(i) for i in range(8)}
    return group


def decide(
    view: GroupView, price: float = 0.8, costs: GroupCosts = COSTS, slowdown: float | None = None
) -> WidthDecision:
    return ReleasePlanner(PlannerSettings(price, slowdown), costs)(view)


def test_workers_leave_when_only_the_tail_is_left() -> None:
    decision = decide(tail().view())
    assert decision.width < 8
    assert decision.reason is WidthReason.CONSOLIDATE
    assert decision.predicted is not None
    assert decision.predicted.steps_with == pytest.approx(20_000, rel=0.02)


def test_time_that_is_worth_nothing_is_not_freed() -> None:
    assert decide(tail().view(), price=0.0).reason is WidthReason.KEEP


def test_the_more_freed_time_is_worth_the_narrower_the_group() -> None:
    widths = [decide(tail().view(), price).width for price in (0.0, 0.3, 0.6, 0.8, 0.9, 1.0)]
    assert widths == sorted(widths, reverse=True)


def test_the_predicted_effect_is_what_comes_when_the_lengths_are_true() -> None:
    group = tail()
    decision = group.decide()
    assert decision.predicted is not None
    at, width = group.steps, len(group.members)
    freed = 0
    while group.generated:
        group.dispatch()
        group.decide()
        before = group.steps
        group.decode(64)
        freed += (group.steps - before) * (8 - len(group.members))
    assert group.steps - at == pytest.approx(decision.predicted.steps_with, rel=0.02)
    assert freed == pytest.approx(decision.predicted.freed_worker_steps, rel=0.1)
    assert width < 8


def test_where_steps_are_the_unit_the_group_narrows_as_far_as_its_samples_fit() -> None:
    decision = decide(replace(tail().view(), floor_workers=1), costs=STEPS)
    assert decision.width == 2  # one worker has no KV beside all experts


def test_nobody_is_sent_where_it_has_no_room() -> None:
    """Three workers hold the sum of all contexts, and no two samples fit on one of them."""
    group = tail(kv_tokens_at_width=(0, 0, *[25_000] * 7), max_samples=1)
    assert decide(group.view(), price=1.0).reason is WidthReason.KEEP


def test_a_guarantee_frees_only_what_costs_no_more_time() -> None:
    view = tail().view()
    none, some, much = (decide(view, slowdown=share) for share in (0.0, 0.05, 10.0))
    for decision, share in ((none, 0.0), (some, 0.05), (much, 10.0)):
        assert decision.predicted is not None
        assert decision.predicted.seconds_with <= decision.predicted.seconds_without * (1 + share)
    assert none.width >= some.width >= much.width


def test_a_guarantee_is_not_spent_twice() -> None:
    group = tail()
    planner = ReleasePlanner(PlannerSettings(max_slowdown_ratio=0.1, replan_steps=8), COSTS)
    first_view = group.view()
    lost_s, total_s = 0.0, None
    for _ in range(400):
        decision = planner(group.view())
        assert decision.predicted is not None or decision.reason is WidthReason.KEEP
        if decision.leavers:
            assert decision.predicted is not None
            total_s = total_s or decision.predicted.seconds_without
            lost_s += decision.predicted.seconds_with - decision.predicted.seconds_without
            group.members = [w for w in group.members if w not in decision.leavers]
            group.worker_of = {
                s: w if w in group.members else group.members[0] for s, w in group.worker_of.items()
            }
            group.widths.append(decision.width)
        group.decode(32)
        if not group.generated:
            break
    assert total_s is not None
    assert lost_s <= 0.1 * total_s + 1e-6
    assert len(first_view.workers) == 8


def test_nobody_leaves_while_samples_wait() -> None:
    group = tail()
    del group.worker_of[0]
    assert decide(group.view()).reason is WidthReason.KEEP


def test_no_busy_worker_leaves_before_the_load_has_shown_how_long_it_is() -> None:
    assert decide(tail(num_ended=1).view()).reason is WidthReason.KEEP
    idle = tail(num_ended=1)
    del idle.generated[0], idle.worker_of[0]
    assert decide(idle.view()).width < 8


def test_a_load_has_only_so_many_changes() -> None:
    view = replace(tail().view(), num_changes=8)
    assert decide(view).reason is WidthReason.KEEP


def test_preempted_samples_do_not_widen_the_group_and_new_ones_do() -> None:
    group = tail()
    group.members = group.members[:3]
    group.max_samples = 2
    group.worker_of = {i: WorkerId(i % 3) for i in range(6)}
    group.generated[6] = group.generated[7] = 50
    assert decide(group.view()).width == 3
    group.generated[6] = 0
    assert decide(group.view()).width > 3


def test_settings_out_of_range_are_refused() -> None:
    for settings_of in (
        lambda: PlannerSettings(price=1.5),
        lambda: PlannerSettings(max_slowdown_ratio=-0.1),
        lambda: PlannerSettings(replan_steps=0),
        lambda: PlannerSettings(max_changes=0),
        lambda: PlannerSettings(least_ended_ratio=2),
    ):
        with pytest.raises(PlanError):
            settings_of()


@given(foreseen_groups())
@settings(max_examples=40, deadline=None)
def test_every_load_ends_within_memory_and_its_width_only_falls(group: ForeseenGroup) -> None:
    group.run()
    assert group.widths == sorted(group.widths, reverse=True)
    assert group.widths[-1] >= group.floor
    assert len(group.widths) - 1 <= 8


@given(foreseen_groups(full_length=True))
@settings(max_examples=40, deadline=None)
def test_counted_with_their_full_length_nobody_is_ever_preempted(group: ForeseenGroup) -> None:
    group.run()
    assert group.num_preempted == 0


@given(foreseen_groups(), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_the_same_view_gives_the_same_decision(group: ForeseenGroup, steps: int) -> None:
    group.dispatch()
    group.decode(steps)
    view = group.view()
    shuffled = replace(view, running=view.running[::-1], queued=view.queued[::-1])
    one = ReleasePlanner(PlannerSettings(group.price), COSTS)(view)
    other = ReleasePlanner(PlannerSettings(group.price), COSTS)(shuffled)
    assert (one.width, one.leavers, one.reason) == (other.width, other.leavers, other.reason)


@given(foreseen_groups())
@settings(max_examples=40, deadline=None)
def test_a_release_leaves_nobody_in_the_queue(group: ForeseenGroup) -> None:
    while group.generated:
        group.dispatch()
        if group.decide().leavers:
            group.dispatch()
            assert not group.view().queued
        group.decode()
