import pytest

from placement.dispatch import plan_dispatch
from placement.errors import PlanError
from placement.release import decide_width
from placement.simulate.baselines import Baseline, HalfOnce, IdleRelease, Placement
from placement.simulate.cluster import Misfortunes
from placement.simulate.foresight import PredictedLengths, TrueLengths
from placement.simulate.policy import LivePolicy
from placement.simulate.rollout import simulate
from placement.views import Binding, DispatchPlan, GroupView
from tests.unit.simulated import batch_of, cluster, workload

PLACEMENTS = [Placement.CHUNK, Placement.ROUND_ROBIN, Placement.LEAST_LOADED]


def live() -> LivePolicy:
    return LivePolicy("today", plan_dispatch, decide_width)


def test_one_sample_takes_its_steps_one_after_another() -> None:
    machine, work = cluster(num_workers=1), batch_of([500])
    outcome = simulate(machine, work, Baseline("one", Placement.CHUNK), PredictedLengths(work))
    decoding_s = sum(machine.step_time.step_s(1, 1, 10 + step) for step in range(1, 501))
    assert outcome.steps == outcome.worker_steps == 500
    assert outcome.span_s == pytest.approx(decoding_s + 10 * machine.prefill_token_s)
    assert outcome.occupied_worker_s == pytest.approx(outcome.span_s)


def test_the_lockstep_ends_with_the_longest_sample() -> None:
    work = batch_of([100, 700, 300, 50])
    outcome = simulate(
        cluster(), work, Baseline("rr", Placement.ROUND_ROBIN), PredictedLengths(work)
    )
    assert outcome.steps == 700
    assert outcome.worker_steps == 4 * 700
    assert outcome.total_tokens == 1150


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_sample_ends_although_most_have_to_wait(placement: Placement) -> None:
    machine, work = cluster(kv_tokens=6000), workload(200)
    outcome = simulate(machine, work, Baseline("queue", placement), PredictedLengths(work))
    assert outcome.num_samples == 200
    assert outcome.total_tokens == int(work.response_tokens_N.sum())
    assert outcome.steps > work.longest_tokens


def test_a_worker_that_runs_out_of_memory_preempts_and_the_sample_is_computed_again() -> None:
    # Twenty samples that are believed short grow together past what one worker holds.
    machine, work = cluster(num_workers=1, kv_tokens=6000), batch_of([700] * 20)
    outcome = simulate(machine, work, Baseline("one", Placement.LEAST_LOADED), TrueLengths(work))
    assert outcome.num_preemptions > 0
    assert outcome.preempted_tokens > 0
    assert outcome.steps > 700


def test_the_live_rules_narrow_the_group_and_use_fewer_worker_steps() -> None:
    machine, work = cluster(), workload(64, limit=2000)
    static = simulate(
        machine, work, Baseline("static", Placement.LEAST_LOADED), PredictedLengths(work)
    )
    elastic = simulate(machine, work, live(), PredictedLengths(work))
    assert elastic.changes[-1].new_width < 4
    assert elastic.worker_steps < static.worker_steps
    assert elastic.unplaced == elastic.num_preemptions == 0


def test_occupied_time_is_what_the_slots_were_leased() -> None:
    machine, work = cluster(), workload(64, limit=2000)
    outcome = simulate(machine, work, live(), PredictedLengths(work))
    leased_s = sum(lease.until_s - lease.from_s for lease in outcome.occupations)
    freed_s = sum(outcome.span_s - lease.until_s for lease in outcome.occupations)
    assert outcome.occupied_worker_s == pytest.approx(leased_s)
    assert leased_s + freed_s == pytest.approx(4 * outcome.span_s)
    assert outcome.idle_worker_s < outcome.occupied_worker_s


def test_the_same_rollout_twice_is_the_same() -> None:
    machine, work = cluster(kv_tokens=8000), workload(100, limit=2000)
    first, second = (simulate(machine, work, live(), PredictedLengths(work)) for _ in range(2))
    assert first == second


def test_workers_leave_when_they_have_nothing_and_not_before() -> None:
    machine, work = cluster(), batch_of([1500, 200, 200, 200])
    policy = Baseline("idle", Placement.LEAST_LOADED, release=IdleRelease())
    outcome = simulate(machine, work, policy, PredictedLengths(work))
    assert [change.new_width for change in outcome.changes] == [1]
    assert outcome.changes[0].step >= 200
    assert outcome.changes[0].moved_samples == 0


def test_half_of_the_workers_leave_once() -> None:
    machine, work = cluster(), workload(64)
    policy = Baseline("half", Placement.LEAST_LOADED, release=HalfOnce())
    outcome = simulate(machine, work, policy, PredictedLengths(work))
    assert [(c.old_width, c.new_width) for c in outcome.changes] == [(4, 2)]


def test_a_slow_worker_slows_the_lockstep() -> None:
    machine, work = cluster(), workload(64)
    policy = Baseline("rr", Placement.ROUND_ROBIN)
    even = simulate(machine, work, policy, PredictedLengths(work))
    slowed = simulate(machine, work, policy, PredictedLengths(work), Misfortunes(slow={2: 1.5}))
    assert slowed.steps == even.steps
    assert slowed.span_s == pytest.approx(1.5 * (even.span_s - even.prefill_s) + even.prefill_s)


def test_a_death_costs_a_restart_and_no_token() -> None:
    machine, work = cluster(), workload(64, limit=2000)
    even = simulate(machine, work, live(), PredictedLengths(work))
    struck = simulate(
        machine, work, live(), PredictedLengths(work), Misfortunes(deaths_s=(2.0,), restart_s=7.0)
    )
    assert struck.restarts == 1
    assert struck.total_tokens == even.total_tokens
    assert struck.span_s > even.span_s + 5


def test_late_leases_join_while_samples_wait() -> None:
    machine, work = cluster(kv_tokens=8200), workload(200)
    late = Misfortunes(late_s={2: 5.0, 3: 5.0})
    outcome = simulate(machine, work, live(), PredictedLengths(work), late)
    grown = [change for change in outcome.changes if change.new_width > change.old_width]
    assert grown
    assert grown[0].at_s >= 5.0
    assert all(lease.from_s >= 5.0 for lease in outcome.occupations if lease.slot >= 2)


def test_a_floor_that_all_workers_together_do_not_reach_is_refused() -> None:
    work = workload(limit=50_000)
    with pytest.raises(PlanError, match="does not fit"):
        simulate(cluster(), work, live(), PredictedLengths(work))


def test_a_rule_that_binds_more_than_fits_is_found_out() -> None:
    def bind_all(view: GroupView) -> DispatchPlan:
        worker_id = view.workers[0].worker_id
        return DispatchPlan(tuple(Binding(s.sample_id, worker_id) for s in view.queued))

    work = batch_of([100] * 30)
    policy = LivePolicy("greedy", bind_all, decide_width)
    with pytest.raises(PlanError, match="was given 30 samples; it decodes 8"):
        simulate(cluster(max_samples=8), work, policy, PredictedLengths(work))
