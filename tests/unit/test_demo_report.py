import json
from dataclasses import replace
from typing import Any

import pytest

from deploy.demo.promises import judge
from deploy.demo.records import DemoRecords
from deploy.demo.report import compare, make_report
from placement.samples import FinishReason
from tests.unit.demo_records import (
    ELASTIC_AT,
    LENGTHS,
    STATIC_AT,
    change,
    good_records,
    sample,
    with_sample,
)


def test_a_demo_that_keeps_its_promises_breaks_none() -> None:
    assert judge(good_records()).broken_promises == ()


def test_the_ratio_is_tokens_per_worker_step_over_tokens_per_worker_step() -> None:
    report = make_report(good_records())
    assert report.static.tokens_per_occupied_worker_step == sum(LENGTHS) / 160
    assert report.worker_step_ratio == pytest.approx(160 / 78)
    assert report.worker_s_ratio == pytest.approx(160 / 80)


def test_the_json_has_the_figures_under_their_names_and_is_strict_json() -> None:
    plain = json.loads(json.dumps(make_report(good_records()).to_json(), allow_nan=False))
    assert plain["identical_tokens"] is True
    assert plain["max_abs_logprob_diff"] == 0.0
    assert plain["samples_compared"] == len(LENGTHS)
    assert (plain["moved_samples"], plain["uneven_maps"]) == (1, 1)
    assert plain["commit"] == "abc"
    first = plain["reconfigurations"][0]
    assert (first["from"], first["to"], first["reason"]) == (4, 3, "consolidate")
    assert first["pause_ms"] == pytest.approx(50)
    assert first["borrower_node_and_slot"] == "node-a/GPU:3"
    assert first["release_to_borrowed_s"] == pytest.approx(1.5)
    assert first["borrower_started_before_rollout_end"] is True
    assert first["step_before_prepare_ms"] == pytest.approx(100)


def test_a_slot_borrowed_before_its_release_is_not_taken_for_the_released_one() -> None:
    records = good_records()
    earlier = replace(records.borrowed[0], started_at=ELASTIC_AT + 11)
    report = make_report(replace(records, borrowed=(earlier,)))
    assert report.reconfigurations[0].borrowed == ()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("other token", "identical tokens"),
        ("other logprob", "logprob difference 0.0"),
        ("missing logprob", "logprob difference 0.0"),
        ("failed", "every sample finishes"),
    ],
)
def test_one_damaged_sample_breaks_a_promise(kind: str, expected: str) -> None:
    good = sample(2, LENGTHS[2])
    damaged = {
        "other token": replace(good, token_ids=(*good.token_ids[:-1], 499)),
        "other logprob": replace(good, logprobs=(*good.logprobs[:-1], -9.0)),
        "missing logprob": replace(good, logprobs=good.logprobs[:-1]),
        "failed": replace(good, finish_reason=FinishReason.FAILED),
    }[kind]
    broken = judge(with_sample(good_records(), 2, damaged)).broken_promises
    assert any(promise.startswith(expected) for promise in broken), broken


def test_with_known_lengths_every_release_is_held_to_a_tenth_and_the_report_says_so() -> None:
    records = replace(good_records(), known_lengths=True)
    report = judge(records)
    assert report.to_json()["oracle"] == report.oracle != ""
    assert make_report(good_records()).oracle == ""
    assert report.broken_promises == ()

    def with_first_release(**changes: Any) -> DemoRecords:
        first, *others = records.elastic.operations
        operations = (replace(first, **changes), *others)
        return replace(records, elastic=replace(records.elastic, operations=operations))

    # The median of both would still be within the quarter that is promised without an oracle.
    (broken,) = judge(with_first_release(steps_error_ratio=-0.11)).broken_promises
    assert broken.startswith("with known lengths predicted steps within 10%")
    unpredicted = tuple(replace(op, predicted=None) for op in records.elastic.operations)
    none = replace(records, short=True, elastic=replace(records.elastic, operations=unpredicted))
    assert any("none was predicted" in promise for promise in judge(none).broken_promises)


def test_a_sample_that_never_came_back_breaks_a_promise() -> None:
    records = good_records()
    fewer = replace(records.elastic, samples=records.elastic.samples[:-1])
    broken = judge(replace(records, elastic=fewer)).broken_promises
    assert any("5 of 6 came back from the elastic rollout" in promise for promise in broken)


def test_fewer_steps_than_tokens_of_the_longest_response_break_a_promise() -> None:
    records = good_records()
    status = records.elastic.status
    uncounted = replace(status, usage=replace(status.usage, steps=LENGTHS[-1] - 1))
    broken = judge(replace(records, elastic=replace(records.elastic, status=uncounted)))
    assert [p for p in broken.broken_promises if p.startswith("every step counts: 39 steps")]


def test_a_release_before_the_first_finished_sample_breaks_a_promise() -> None:
    records = good_records()
    early = change(ELASTIC_AT, (0, 1, 2, 3), (0, 1), (8, 8), finished_ratio=0.0)
    elastic = replace(records.elastic, operations=(early, *records.elastic.operations))
    broken = judge(replace(records, elastic=elastic)).broken_promises
    assert [p for p in broken if p.startswith("no release before")] == list(broken)


def test_a_group_that_never_shrinks_breaks_every_promise_about_releases() -> None:
    records = good_records()
    lazy = replace(records.static, operations=())
    broken = " / ".join(judge(replace(records, elastic=lazy, borrowed=())).broken_promises)
    for promise in ("at least 2 releases", "sample moves", "uneven", "2.0 x", "another job"):
        assert promise in broken


def test_a_borrower_that_came_only_after_the_rollout_breaks_a_promise() -> None:
    records = good_records()
    late = tuple(replace(b, started_at=b.started_at + 100) for b in records.borrowed)
    broken = judge(replace(records, borrowed=late)).broken_promises
    assert any(promise.startswith("another job works") for promise in broken)


def test_a_borrower_during_the_static_run_breaks_a_promise() -> None:
    records = good_records()
    early = replace(records.borrowed[0], started_at=STATIC_AT + 1)
    broken = judge(replace(records, borrowed=(*records.borrowed, early))).broken_promises
    assert any("during the static run: 1" in promise for promise in broken)


def test_a_group_that_does_not_grow_back_breaks_a_promise() -> None:
    broken = judge(replace(good_records(), regrow_operations=())).broken_promises
    assert broken == ("the group grows back: no change made it wider",)


def test_the_short_demo_promises_no_ratio_of_the_full_one_and_no_regrowth() -> None:
    records = good_records()
    slower = replace(
        records.elastic,
        status=replace(
            records.elastic.status,
            usage=replace(records.elastic.status.usage, occupied_worker_steps=150),
        ),
    )
    short = replace(records, short=True, elastic=slower, regrown=None, regrow_operations=())
    assert judge(short).broken_promises == ()


def test_a_shorter_rollout_is_compared_as_far_as_it_goes() -> None:
    records = good_records()
    assert records.regrown is not None
    assert compare(records.static, records.regrown, 6).identical_tokens
    assert not compare(records.static, records.regrown).identical_tokens


def test_outputs_may_differ_where_exact_mode_is_not_to_be_had() -> None:
    records = good_records()
    sample = records.elastic.samples[0]
    other = replace(sample, result=replace(sample.result, token_ids=(1,), logprobs=(-9.0,)))
    elastic = replace(records.elastic, samples=(other, *records.elastic.samples[1:]))
    assert judge(replace(records, elastic=elastic)).broken_promises
    assert not judge(replace(records, elastic=elastic, exact=False)).broken_promises


def test_predicted_steps_stand_beside_measured_ones() -> None:
    report = judge(good_records())
    plain = report.to_json()
    assert plain["median_steps_error_ratio"] == pytest.approx(0.1)
    first = plain["reconfigurations"][0]
    assert (first["predicted_steps"], first["measured_steps"]) == (45.0, 50)
    assert first["steps_error_ratio"] == pytest.approx(-0.1)


def test_more_steps_than_static_break_a_promise_of_the_full_demo() -> None:
    records = good_records()
    usage = replace(records.elastic.status.usage, steps=41)
    slower = replace(records.elastic, status=replace(records.elastic.status, usage=usage))
    assert "1.02 x the lockstep steps" in " ".join(
        judge(replace(records, elastic=slower)).broken_promises
    )


def test_predictions_that_miss_break_a_promise_of_the_full_demo() -> None:
    records = good_records()
    missed = tuple(replace(op, steps_error_ratio=-0.3) for op in records.elastic.operations)
    silent = tuple(
        replace(op, predicted=None, steps_error_ratio=None) for op in records.elastic.operations
    )
    for operations, what in ((missed, "30%"), (silent, "nothing was predicted")):
        elastic = replace(records.elastic, operations=operations)
        broken = " ".join(judge(replace(records, elastic=elastic)).broken_promises)
        assert f"within 25% of those that came: {what}" in broken
