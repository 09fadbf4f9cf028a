from dataclasses import replace
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from placement.ids import SampleId, WorkerId
from placement.memory import MemoryBudget
from placement.release import IdlePolicy, ReleaseRule, decide_width
from placement.views import GroupView, SampleView, WidthReason, WorkerView
from tests.unit.fake_group import FakeGroup, groups, lengths, loaded_groups


def sample(order: int, worker: int | None, context: int = 10, full: int = 100) -> SampleView:
    worker_id = None if worker is None else WorkerId(worker)
    return SampleView(SampleId(f"r/{order}/0"), context, full, order, worker_id)


def group_of(
    num_workers: int, *samples: SampleView, any_finished: bool = True, floor: int = 1
) -> GroupView:
    """Workers of 4 samples of 100 tokens each at any width; at most 4 workers."""
    return GroupView(
        workers=tuple(WorkerView(WorkerId(i), 4, 400) for i in range(num_workers)),
        running=tuple(s for s in samples if s.worker_id is not None),
        queued=tuple(s for s in samples if s.worker_id is None),
        num_experts=16,
        kv_tokens_at_width=(0, 400, 400, 400, 400),
        max_workers=4,
        floor_workers=floor,
        any_finished=any_finished,
    )


def test_an_idle_worker_leaves() -> None:
    view = group_of(2, *(sample(i, 1) for i in range(4)))
    decision = decide_width(view)
    assert (decision.width, decision.leavers) == (1, (WorkerId(0),))
    assert decision.reason is WidthReason.IDLE


def test_samples_of_several_workers_consolidate_where_most_context_is() -> None:
    view = group_of(3, sample(0, 0, 20), sample(1, 1, 90), sample(2, 2, 30), sample(3, 2, 30))
    decision = decide_width(view)
    assert (decision.width, decision.leavers) == (1, (WorkerId(0), WorkerId(2)))
    assert decision.reason is WidthReason.CONSOLIDATE
    assert "4 running samples" in decision.explanation
    assert "3 of them move, 3 workers now, floor 1" in decision.explanation


def test_a_sum_that_fits_is_not_enough_when_the_samples_do_not() -> None:
    # Two workers have 800 tokens, but no two samples of 250 share the 400 of one worker.
    view = group_of(3, *(sample(i, i, full=250) for i in range(3)))
    assert decide_width(view).reason is WidthReason.KEEP
    smaller = group_of(3, sample(0, 0, full=250), sample(1, 1, full=250), sample(2, 2, full=150))
    assert decide_width(smaller).width == 2


def test_nobody_stays_whose_own_samples_outgrow_its_smaller_kv() -> None:
    # Worker 0 has most context, but beside more experts it could not hold its own samples.
    samples = [*(sample(i, 0, context=90) for i in range(4)), sample(4, 1), sample(5, 2)]
    view = replace(group_of(3, *samples), kv_tokens_at_width=(0, 300, 300, 400, 400))
    assert decide_width(view).leavers == (WorkerId(0),)


def test_a_release_that_would_be_followed_by_another_waits() -> None:
    # Three workers would do; once the sample of 1 token is elsewhere, two would do as well. To
    # two at once there is no way (14 of 14 tokens must fit exactly), so nothing happens yet.
    view = replace(
        group_of(5, sample(0, 1, 4, 5), sample(1, 0, 1, 1), sample(2, 3, 2, 2), sample(3, 4, 1, 6)),
        kv_tokens_at_width=(0, 3, 7, 14, 14, 14),
        max_workers=5,
    )
    decision = decide_width(view)
    assert decision.reason is WidthReason.KEEP
    assert "3 workers would hold them, and soon after that fewer" in decision.explanation
    roomy = replace(view, kv_tokens_at_width=(0, 3, 9, 14, 14, 14))
    assert decide_width(roomy).width == 2


def test_nobody_leaves_before_a_sample_has_ended() -> None:
    view = group_of(4, sample(0, 0), any_finished=False)
    assert decide_width(view).reason is WidthReason.KEEP
    assert decide_width(replace(view, any_finished=True)).width == 1


def test_nobody_leaves_while_samples_are_queued() -> None:
    assert decide_width(group_of(4, sample(0, 0), sample(1, None))).reason is WidthReason.KEEP


def test_the_floor_stays() -> None:
    assert decide_width(group_of(4, sample(0, 0), floor=3)).width == 3


def test_the_group_grows_for_its_queue_only_as_far_as_that_helps() -> None:
    samples = [sample(i, 0) for i in range(4)] + [sample(i, None) for i in range(4, 9)]
    decision = decide_width(group_of(1, *samples))
    assert (decision.width, decision.reason) == (3, WidthReason.QUEUE)
    assert decision.explanation.startswith("5 of 5 queued samples find no room on 1 workers")


def test_growth_that_would_be_followed_by_a_release_waits() -> None:
    # A third worker would take the queued sample, and then the two short ones fit on one.
    view = group_of(2, sample(0, 0, 10, 30), sample(1, 1, 10, 20), sample(2, None, 70, 390))
    decision = decide_width(view)
    assert decision.reason is WidthReason.KEEP
    assert "3 workers would not all stay in use" in decision.explanation
    assert decide_width(replace(view, any_finished=False)).width == 3
    # Once nothing runs that could end and make room, waiting would be forever.
    alone = replace(view, running=(), kv_tokens_at_width=(0, 300, 300, 400, 400))
    alone = replace(alone, workers=tuple(replace(w, kv_capacity_tokens=300) for w in view.workers))
    assert decide_width(alone).width == 3


def test_a_queue_that_no_width_holds_takes_all_workers() -> None:
    decision = decide_width(group_of(1, *(sample(i, None) for i in range(50))))
    assert (decision.width, decision.reason) == (4, WidthReason.QUEUE)


def test_a_full_group_keeps_its_width_and_says_why() -> None:
    decision = decide_width(group_of(4, *(sample(i, None) for i in range(50))))
    assert decision.reason is WidthReason.KEEP
    assert "no more than 4 may be leased" in decision.explanation


def test_a_sample_too_long_for_the_present_width_makes_the_group_grow() -> None:
    view = replace(
        group_of(1, sample(0, None, full=350)), kv_tokens_at_width=(0, 300, 300, 400, 400)
    )
    view = replace(view, workers=(WorkerView(WorkerId(0), 4, 300),))
    assert decide_width(view).width == 3


def test_a_group_of_nobody_starts_with_all_when_work_arrives() -> None:
    assert decide_width(group_of(0, sample(0, None)), IdlePolicy.NONE).width == 4


def test_a_static_rollout_gets_all_workers_and_keeps_them() -> None:
    view = replace(group_of(2, sample(0, 0)), nobody_leaves=True)
    decision = decide_width(view)
    assert (decision.width, decision.reason, decision.leavers) == (4, WidthReason.STATIC, ())


@pytest.mark.parametrize(
    ("policy", "width"), [(IdlePolicy.NONE, 0), (IdlePolicy.FLOOR, 2), (IdlePolicy.ALL, 4)]
)
@pytest.mark.parametrize("now", [0, 1, 2, 3, 4])
def test_a_drained_group_takes_the_width_of_its_idle_policy(
    policy: IdlePolicy, width: int, now: int
) -> None:
    decision = decide_width(group_of(now, floor=2, any_finished=False), policy)
    assert decision.width == width
    assert decision.leavers == tuple(WorkerId(i) for i in range(width, now))
    assert decision.reason is (WidthReason.KEEP if width == now else WidthReason.DRAINED)


def test_the_first_rule_can_be_replaced() -> None:
    rules: list[ReleaseRule] = [decide_width, partial(decide_width)]
    assert {rule(group_of(2), IdlePolicy.NONE).width for rule in rules} == {0}


@given(loaded_groups())
@settings(max_examples=300)
def test_a_change_that_was_carried_out_is_followed_by_keep(group: FakeGroup) -> None:
    decision = group.decide()
    event(decision.reason)
    before = group.view()
    if decision.width == len(before.workers):
        return
    group.carry_out(decision)
    if decision.reason is WidthReason.QUEUE and not before.running:
        return  # nothing could proceed: the one case in which growth need not be settled
    after = group.decide()
    assert after.reason is WidthReason.KEEP, after
    assert after.width == len(group.members)


@given(loaded_groups())
def test_a_release_finds_room_for_every_sample_that_it_moves(group: FakeGroup) -> None:
    decision = group.decide()
    if decision.reason in {WidthReason.IDLE, WidthReason.CONSOLIDATE}:
        group.carry_out(decision)
        assert not group.view().queued


@given(loaded_groups(), st.booleans())
def test_a_release_needs_an_ended_sample_an_empty_queue_and_the_floor(
    group: FakeGroup, any_finished: bool
) -> None:
    view = replace(group.view(), any_finished=any_finished)
    decision = decide_width(view, group.idle_policy)
    assert decision.width <= view.max_workers
    assert len(decision.leavers) == max(0, len(view.workers) - decision.width)
    assert set(decision.leavers) <= {w.worker_id for w in view.workers}
    if decision.leavers and (view.running or view.queued):
        assert any_finished
        assert not view.queued
        assert decision.width >= view.floor_workers


@given(loaded_groups())
def test_the_same_view_gives_the_same_decision(group: FakeGroup) -> None:
    view = group.view()
    shuffled = replace(view, running=view.running[::-1], queued=view.queued[::-1])
    assert decide_width(view) == decide_width(shuffled)


@given(groups(), st.data())
def test_a_load_ends_without_flip_flop_however_its_samples_end(
    group: FakeGroup, data: st.DataObject
) -> None:
    """Nothing starves, nobody is preempted, and between two events the width turns only once."""
    group.arrive(data.draw(lengths(group)))
    later = data.draw(lengths(group, most=5))
    for _ in range(2 * (len(group.samples) + len(later)) + 2):
        group.dispatch()
        decision = group.decide()
        while decision.width != len(group.members):
            before = len(group.members)
            group.carry_out(decision)
            grew = len(group.members) > before
            decision = group.decide()
            assert not (grew and decision.leavers), decision
            assert grew or decision.width <= len(group.members), decision
        running = [s.sample_id for s in group.view().running]
        if running:
            group.finish(data.draw(st.sampled_from(running)))
        elif later and not group.samples:
            group.arrive(later)
            later = []
    assert not group.samples


def test_a_long_tail_goes_down_the_ladder_of_widths() -> None:
    budget = MemoryBudget(16, 4, 10, 50, 4, 50 * 200)
    group = FakeGroup(budget, max_model_len=40, max_samples=4)
    group.found(4)
    group.arrive([(8, 40)] * 16)
    group.dispatch()
    widths = []
    while group.samples:
        group.finish(min(group.samples))
        if group.samples:
            group.carry_out(group.decide())
            widths.append(len(group.members))
    assert widths == [4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1]
