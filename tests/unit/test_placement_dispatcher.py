import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.dispatch import plan_dispatch
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.errors import PlanError
from placement.horizon import GroupCosts
from placement.ids import SampleId, WorkerId
from placement.rebalance import RebalanceSettings
from placement.reserve import Reserve, ReserveTuner
from placement.views import GroupView, LengthBelief, MoveKind, SampleView, WorkerView
from tests.unit.fake_group import FakeGroup, loaded_groups
from tests.unit.foreseen_group import COSTS, ForeseenGroup, certain, foreseen_groups


def sample(
    order: int, expected: int | None = None, worker: int | None = None, generated: int = 0
) -> SampleView:
    return SampleView(
        SampleId(str(order)),
        10 + generated,
        1010,
        order,
        None if worker is None else WorkerId(worker),
        generated,
        belief=None if expected is None else certain(expected),
    )


def group_of(*samples: SampleView, kv_tokens: int = 2000, max_samples: int = 8) -> GroupView:
    return GroupView(
        workers=tuple(WorkerView(WorkerId(i), max_samples, kv_tokens) for i in range(2)),
        running=tuple(s for s in samples if s.worker_id is not None),
        queued=tuple(s for s in samples if s.worker_id is None),
        num_experts=8,
        kv_tokens_at_width=(0, kv_tokens, kv_tokens),
        max_workers=2,
        floor_workers=1,
        any_finished=False,
    )


def dispatcher(reserve: Reserve | None = None, costs: GroupCosts = COSTS) -> Dispatcher:
    tuner = ReserveTuner(reserve or Reserve(ratio=0.5, least_tokens=10))
    return Dispatcher(DispatchSettings(), costs, tuner)


def bound(view: GroupView, reserve: Reserve | None = None) -> list[str]:
    return [binding.sample_id for binding in dispatcher(reserve)(view).bindings]


def test_the_longest_expected_starts_first() -> None:
    assert bound(group_of(sample(0, 100), sample(1, 900), sample(2, 400))) == ["1", "2", "0"]


def test_a_scout_of_each_prompt_goes_ahead_while_its_siblings_could_learn_from_it() -> None:
    def of_prompt(order: int, key: str, tokens: int, sigma: float) -> SampleView:
        belief = LengthBelief(math.log(tokens), sigma)
        return replace(sample(order), prompt_key=key, belief=belief)

    def siblings(sigma: float) -> list[SampleView]:
        long = [of_prompt(i, "long", 400, sigma) for i in range(3)]
        return [*long, *(of_prompt(i, "short", 100, sigma) for i in range(3, 6))]

    assert bound(group_of(*siblings(0.3))) == ["0", "3", "1", "2", "4", "5"]
    assert bound(group_of(*siblings(0.3)[::-1])) == ["0", "3", "1", "2", "4", "5"]
    assert bound(group_of(*siblings(0.001))) == ["0", "1", "2", "3", "4", "5"]
    rule = dispatcher()
    rule(group_of(*siblings(0.3)[2:4]))
    begun = replace(sample(9, 50, worker=0, generated=5), prompt_key="other")
    later = replace(group_of(*siblings(0.3)[:2], *siblings(0.3)[4:], begun), steps=9)
    assert [b.sample_id for b in rule(later).bindings] == ["0", "1", "4", "5"]


def test_without_beliefs_or_with_equal_ones_the_order_is_that_of_arrival() -> None:
    assert bound(group_of(sample(2), sample(0), sample(1))) == ["0", "1"]  # by full length: two
    assert bound(group_of(*(sample(i, 50) for i in (2, 0, 1)))) == ["0", "1", "2"]


def test_a_sample_that_ran_before_goes_before_all_others() -> None:
    view = group_of(sample(0, 900), sample(1, 900), sample(7, 100, generated=50))
    assert bound(view)[0] == "7"


def test_what_is_expected_decides_how_many_fit() -> None:
    queued = [sample(i, 100) for i in range(100)]
    view = group_of(*queued, max_samples=100)
    assert len(bound(view)) == 2 * (2000 // 61)  # 10, and half of a little over 100
    assert len(bound(view, Reserve(full_length=True))) == 2
    assert len(bound(view, Reserve(ratio=0.0))) == 100


def test_length_order_is_kept_within_a_window_of_arrivals_so_that_nobody_starves() -> None:
    view = group_of(*(sample(i, 100 * (i + 1)) for i in range(4)))
    windowed = Dispatcher(DispatchSettings(window_samples=2), COSTS, ReserveTuner(Reserve(0.0, 0)))
    assert [b.sample_id for b in windowed(view).bindings] == ["1", "0", "3", "2"]


def test_where_nothing_runs_a_sample_starts_though_its_reserve_does_not_fit() -> None:
    view = group_of(sample(0, 900), kv_tokens=500)
    assert bound(view, Reserve(ratio=1.0)) == ["0"]


def test_a_preemption_raises_the_reserve_and_quiet_steps_lower_it() -> None:
    tuner = ReserveTuner(Reserve(0.3))
    view = replace(group_of(sample(0)), steps=64)
    quiet = tuner.update(view).ratio
    assert quiet < 0.3
    preempted = tuner.update(replace(view, steps=128, num_preempted=3)).ratio
    assert preempted > 0.3
    assert tuner.update(replace(view, steps=130, num_preempted=9)).ratio == preempted
    assert tuner.update(replace(view, steps=0, num_preempted=0)).ratio == preempted


def test_a_running_sample_on_a_worker_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PlanError, match="runs on worker 7"):
        dispatcher()(group_of(sample(0, worker=7), sample(1)))


# Evening out

READING = GroupCosts(
    StepTimeModel(0.001, context_token_s=1e-6),
    ReconfigurationCost(1.0, 1e9, 1e9),
    kv_token_bytes=1000,
    recompute_token_s=1e-4,
)


def uneven(steps: int) -> GroupView:
    samples = [sample(i, 900, worker=0, generated=300) for i in range(4)]
    return replace(group_of(*samples, sample(9, 900, worker=1, generated=10)), steps=steps)


def test_samples_move_from_the_heaviest_to_the_lightest_worker() -> None:
    plan = dispatcher(costs=READING)(uneven(512))
    assert [(m.source, m.destination) for m in plan.moves] == [(0, 1)] * 2
    assert not plan.bindings


def test_a_move_is_by_the_cheaper_way() -> None:
    assert {m.by for m in dispatcher(costs=READING)(uneven(512)).moves} == {MoveKind.COPY}
    slow_link = replace(READING, change=ReconfigurationCost(1.0, 1e9, 1e3))
    cheap = replace(slow_link, recompute_token_s=1e-6)
    assert {m.by for m in dispatcher(costs=cheap)(uneven(512)).moves} == {MoveKind.RECOMPUTE}
    uncopyable = replace(READING, can_copy=False, recompute_token_s=1e-6)
    assert {m.by for m in dispatcher(costs=uncopyable)(uneven(512)).moves} == {MoveKind.RECOMPUTE}


def test_nothing_moves_that_does_not_pay_for_itself() -> None:
    dear = replace(READING, can_copy=False, recompute_token_s=1.0)
    assert dispatcher(costs=dear)(uneven(512)).moves == ()


def test_the_load_is_evened_out_only_so_often_and_not_at_all_if_not_wanted() -> None:
    rule = dispatcher(costs=READING)
    assert rule(uneven(100)).moves == ()
    assert rule(uneven(512)).moves
    assert rule(uneven(600)).moves == ()
    still = Dispatcher(DispatchSettings(rebalance=None), READING)
    assert still(uneven(512)).moves == ()


def test_nothing_moves_to_where_its_full_length_has_no_room() -> None:
    view = uneven(512)
    small = tuple(replace(w, kv_capacity_tokens=1025) for w in view.workers)
    assert dispatcher(costs=READING)(replace(view, workers=small)).moves == ()


def test_an_engine_that_never_preempts_counts_everybody_s_full_length() -> None:
    view = uneven(512)
    full_tokens = view.running[0].max_context_tokens
    # Room for what is there and one more at its full length, not for two full lengths.
    small = tuple(replace(w, kv_capacity_tokens=2 * full_tokens - 1) for w in view.workers)
    for full_length in (False, True):
        settings = DispatchSettings(RebalanceSettings(full_length=full_length))
        moves = Dispatcher(settings, READING)(replace(view, workers=small)).moves
        assert bool(moves) != full_length


@given(foreseen_groups())
@settings(max_examples=40, deadline=None)
def test_nobody_starves_and_nobody_is_bound_twice(group: ForeseenGroup) -> None:
    group.run()
    assert not group.generated


@given(foreseen_groups())
@settings(max_examples=40, deadline=None)
def test_the_same_view_gives_the_same_plan(group: ForeseenGroup) -> None:
    group.dispatch()
    group.decode(3)
    view = replace(group.view(), steps=600)
    mixed = replace(view, queued=view.queued[::-1], running=view.running[::-1])
    assert dispatcher(costs=READING)(view) == dispatcher(costs=READING)(mixed)


@given(foreseen_groups())
@settings(max_examples=40, deadline=None)
def test_moves_leave_every_sample_on_one_worker_with_room(group: ForeseenGroup) -> None:
    group.dispatcher = Dispatcher(
        DispatchSettings(RebalanceSettings(1, 10_000, 1.0)), READING, ReserveTuner(Reserve())
    )
    group.run()


def test_a_belief_that_is_far_off_only_costs_order() -> None:
    wrong = [LengthBelief(0.0, 0.01), LengthBelief(11.0, 0.01)] * 3
    group = ForeseenGroup([50] * 6, list(wrong), 60, (0, 150, 150), 4, 1, False, 0.5)
    group.run()
    assert group.steps < 400


@given(loaded_groups())
@settings(max_examples=60, deadline=None)
def test_where_nothing_is_believed_it_binds_as_the_simple_rule_does(group: FakeGroup) -> None:
    view = group.view()
    simple = plan_dispatch(view).bindings
    if simple:  # with nobody running and no room, only this rule starts one all the same
        assert dispatcher()(view).bindings == simple
