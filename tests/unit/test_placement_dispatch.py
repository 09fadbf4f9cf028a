from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.dispatch import assign_static_chunks, plan_dispatch, plan_static_chunks
from placement.errors import PlanError
from placement.ids import SampleId, WorkerId
from placement.views import GroupView, SampleView, WorkerView
from tests.unit.fake_group import FakeGroup, loaded_groups


def group_of(*samples: SampleView, kv_tokens: int = 100, max_samples: int = 4) -> GroupView:
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


def sample(order: int, full: int = 10, worker: int | None = None) -> SampleView:
    worker_id = None if worker is None else WorkerId(worker)
    return SampleView(SampleId(str(order)), 1, full, order, worker_id)


def bound(view: GroupView) -> list[tuple[str, int]]:
    return [(b.sample_id, b.worker_id) for b in plan_dispatch(view).bindings]


def test_samples_start_in_arrival_order_and_spread() -> None:
    assert bound(group_of(sample(2), sample(0), sample(1))) == [("0", 0), ("1", 1), ("2", 0)]


def test_a_sample_that_comes_back_from_a_leaver_goes_first() -> None:
    view = group_of(*(sample(i, worker=0) for i in (1, 2)), sample(9), sample(3), max_samples=1)
    view = replace(view, workers=(WorkerView(WorkerId(0), 3, 100),))
    assert bound(view) == [("3", 0)]


def test_running_samples_count_with_their_full_length() -> None:
    view = group_of(sample(0, 60, 0), sample(1, 60, 1), sample(2, 41))
    assert bound(view) == []
    assert bound(replace(view, queued=(sample(2, 40),))) == [("2", 0)]


def test_a_free_sample_slot_is_needed_too() -> None:
    view = group_of(sample(0, worker=0), sample(1, worker=1), sample(2), max_samples=1)
    assert bound(view) == []


def test_a_running_sample_on_a_worker_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PlanError, match="runs on worker 7"):
        plan_dispatch(group_of(sample(0, worker=7), sample(1)))


@given(loaded_groups())
def test_dispatch_binds_each_sample_once_and_preempts_nobody(group: FakeGroup) -> None:
    bindings = plan_dispatch(group.view()).bindings
    assert len({b.sample_id for b in bindings}) == len(bindings)
    assert {b.sample_id for b in bindings} <= {s.sample_id for s in group.view().queued}
    group.dispatch()  # checks slots and KV against what each worker really has
    assert plan_dispatch(group.view()).bindings == ()


@given(loaded_groups())
def test_dispatch_does_not_depend_on_the_order_of_the_records(group: FakeGroup) -> None:
    view = group.view()
    mixed = replace(view, queued=view.queued[::-1], running=view.running[::-1])
    assert plan_dispatch(view) == plan_dispatch(mixed)


@given(loaded_groups())
def test_the_head_of_the_queue_starts_if_it_fits_anywhere(group: FakeGroup) -> None:
    view = group.view()
    if view.queued:
        head = min(view.queued, key=lambda s: s.order)
        alone = plan_dispatch(replace(view, queued=(head,))).bindings
        bindings = plan_dispatch(view).bindings
        if alone:
            assert bindings[:1] == alone
        else:  # smaller ones behind it may pass
            assert head.sample_id not in {b.sample_id for b in bindings}


@given(st.integers(0, 50), st.integers(1, 8))
def test_chunks_are_contiguous_and_even(num_samples: int, num_workers: int) -> None:
    ids = [SampleId(str(i)) for i in range(num_samples)]
    chunk_worker = assign_static_chunks(ids, [WorkerId(10 + i) for i in range(num_workers)])
    workers = [chunk_worker[i] for i in ids]
    assert workers == sorted(workers)
    counts = Counter(workers)
    sizes = [counts[WorkerId(10 + i)] for i in range(num_workers)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_chunk_without_workers_is_an_error() -> None:
    with pytest.raises(PlanError, match="needs workers"):
        assign_static_chunks([SampleId("0")], [])


def test_a_pinned_sample_waits_for_its_own_worker_though_the_other_is_idle() -> None:
    samples = [sample(i, 50) for i in range(4)]
    chunk_worker = {s.sample_id: WorkerId(0) for s in samples}
    plan = plan_static_chunks(group_of(*samples), chunk_worker)
    assert [(b.sample_id, b.worker_id) for b in plan.bindings] == [("0", 0), ("1", 0)]


def test_nobody_passes_a_sample_that_waits_in_the_same_chunk() -> None:
    samples = [sample(0, 60), sample(1, 60), sample(2, 10), sample(3, 10)]
    pins = dict(zip((s.sample_id for s in samples), map(WorkerId, (0, 0, 0, 1)), strict=True))
    plan = plan_static_chunks(group_of(*samples), pins)
    assert [(b.sample_id, b.worker_id) for b in plan.bindings] == [("0", 0), ("3", 1)]


def test_samples_of_other_rollouts_are_left_alone() -> None:
    assert plan_static_chunks(group_of(sample(0)), {}).bindings == ()


def test_a_pin_to_a_worker_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PlanError, match="pinned to worker 5"):
        plan_static_chunks(group_of(sample(0)), {SampleId("0"): WorkerId(5)})
