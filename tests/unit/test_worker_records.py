"""What a worker keeps until it is asked: jobs for its decode thread, events for the coordinator."""

import threading

import pytest

from actors.boundary_jobs import BoundaryJobs
from actors.outbox import Outbox
from actors.protocol import Evicted, Tokens
from actors.step_record import StepRecord
from placement.errors import MembershipError
from placement.ids import SampleId
from placement.samples import FinishReason

A, B = SampleId("a"), SampleId("b")


def _tokens(sample: SampleId, start: int, *ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(sample, start, ids, tuple(-float(i) for i in ids), finish)


def test_consecutive_tokens_of_a_sample_come_as_one_event_in_order() -> None:
    outbox = Outbox()
    for event in (_tokens(A, 0, 1), _tokens(B, 0, 7), _tokens(A, 1, 2), _tokens(B, 1, 8)):
        outbox.put(event)
    cursor, events = outbox.collect(0, wait_s=0)
    assert cursor == 4
    assert events == (_tokens(A, 0, 1, 2), _tokens(B, 0, 7, 8))


def test_tokens_are_not_merged_across_an_eviction() -> None:
    outbox = Outbox()
    for event in (_tokens(A, 0, 1), Evicted(A), _tokens(A, 1, 2)):
        outbox.put(event)
    assert outbox.collect(0, wait_s=0)[1] == (_tokens(A, 0, 1), Evicted(A), _tokens(A, 1, 2))


def test_events_stay_until_they_are_acknowledged() -> None:
    outbox = Outbox()
    outbox.put(_tokens(A, 0, 1))
    first = outbox.collect(0, wait_s=0)
    assert outbox.collect(0, wait_s=0) == first
    outbox.put(_tokens(A, 1, 2, finish=FinishReason.LENGTH))
    cursor, events = outbox.collect(first[0], wait_s=0)
    assert (cursor, events) == (2, (_tokens(A, 1, 2, finish=FinishReason.LENGTH),))
    assert outbox.collect(cursor, wait_s=0) == (2, ())


def test_an_ending_is_told_at_once_to_whoever_waits() -> None:
    outbox = Outbox()
    answers: list[tuple[int, tuple[object, ...]]] = []
    waiter = threading.Thread(target=lambda: answers.append(outbox.collect(0, wait_s=20)))
    waiter.start()
    outbox.put(_tokens(A, 0, 1, finish=FinishReason.STOP))
    waiter.join(10)
    assert not waiter.is_alive()
    assert answers[0][0] == 1


def test_a_job_gives_its_result_or_its_error_to_who_posted_it() -> None:
    jobs = BoundaryJobs()
    result, error = jobs.post(lambda: 5), jobs.post(lambda: 1 // 0)
    jobs.run()
    assert result.result(0) == 5
    assert isinstance(error.exception(0), ZeroDivisionError)


def test_no_job_waits_for_a_decode_thread_that_has_ended() -> None:
    jobs = BoundaryJobs()
    waiting = jobs.post(lambda: 5)
    jobs.close("worker 3 has left")
    with pytest.raises(MembershipError, match="worker 3 has left"):
        waiting.result(0)
    with pytest.raises(MembershipError, match="worker 3 has left"):
        jobs.post(lambda: 5)


class FakeEngine:
    """What a step record asks an engine."""

    num_running = kv_used_tokens = refused_kv = preempted = 0
    kv_capacity_tokens = 64
    copied_kv = (4096, 0.5)


def test_a_prefill_costs_what_its_step_took_beyond_the_usual() -> None:
    record = StepRecord()
    for start_s, seconds, prefilled_tokens in (
        (0.0, 0.25, 0),
        (1.0, 0.25, 0),
        (2.0, 1.0, 30),
        (4.0, 0.125, 2),
        (5.0, 0.25, 0),
    ):
        record.step(
            start_s,
            start_s + seconds,
            made_tokens=True,
            unfinished=True,
            prefilled_tokens=prefilled_tokens,
        )
    stats = record.take_stats(FakeEngine())  # type: ignore[arg-type]
    assert (stats.prefilled_tokens, stats.prefill_s) == (32, 0.75)
    assert (stats.copied_kv_bytes, stats.copied_kv_s) == (4096, 0.5)
    assert (stats.steps, stats.step_s_sum) == (5, 1.875)
