from dataclasses import replace

import pytest

from actors.accounting import LeaseLedger
from actors.admission import make_samples
from actors.attempts import Attempts
from actors.backlog import Backlog
from actors.journal import MemoryJournal
from actors.protocol import Tokens
from actors.rollout_api import RolloutRequest, ServedModel, Strategy
from actors.settings import CoordinatorSettings
from actors.telemetry import Telemetry
from actors.token_detail import RoutingLayout, TokenDetail
from placement.errors import MembershipError, UnknownIdError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sample, Sampling
from tests.unit.coordinator_harness import make_request

MODEL = ServedModel("model", 100, 200, True, ())
S0, S1, S2 = (SampleId(f"r/{index}/0") for index in range(3))
W = WorkerId(5)


def samples_of(request: RolloutRequest) -> tuple[Sample, ...]:
    return make_samples(request, MODEL)


def backlog(journal: MemoryJournal, max_kept: int = 64, keep_ended_s: float = 0.0) -> Backlog:
    ledger = LeaseLedger(0.0)
    telemetry = Telemetry(lambda: ledger.totals(0.0))
    settings = CoordinatorSettings(max_kept_rollouts=max_kept, keep_ended_s=keep_ended_s)
    return Backlog(settings, journal, ledger, telemetry, lambda: 0.0)


def with_rollout(journal: MemoryJournal) -> Backlog:
    records = backlog(journal)
    request = make_request("r", [9, 9, 9])
    records.accept(request, samples_of(request))
    return records


def tokens(sample_id: SampleId, start: int, *ids: int, end: FinishReason | None = None) -> Tokens:
    return Tokens(sample_id, start, ids, tuple(-float(i) for i in ids), end)


def test_a_report_that_is_heard_twice_counts_once() -> None:
    records = with_rollout(MemoryJournal())
    records.bind(records.record(S0), W)
    for event in (tokens(S0, 0, 1, 2), tokens(S0, 0, 1, 2), tokens(S0, 1, 2, 3)):
        assert records.add_tokens(event)
    assert records.record(S0).token_ids == [1, 2, 3]
    assert records.record(S0).logprobs == [-1.0, -2.0, -3.0]


def test_a_gap_between_reports_is_an_error_with_both_numbers() -> None:
    records = with_rollout(MemoryJournal())
    records.add_tokens(tokens(S0, 0, 1))
    with pytest.raises(MembershipError, match=r"has 1 tokens.*starts at 3"):
        records.add_tokens(tokens(S0, 3, 4))


def test_a_sample_that_comes_back_is_at_the_head_with_its_tokens() -> None:
    records = with_rollout(MemoryJournal())
    records.bind(records.record(S0), W)
    records.add_tokens(tokens(S0, 0, 1, 2))
    records.let_go(S0, W)
    queued = records.queued(Strategy.ELASTIC)
    assert [record.sample.sample_id for record in queued] == [S0, S1, S2]
    assert queued[0].to_submit().generated_ids == (1, 2)


def test_a_late_notice_of_an_earlier_worker_takes_nothing_back() -> None:
    records = with_rollout(MemoryJournal())
    records.bind(records.record(S0), W)
    records.let_go(S0, WorkerId(4))
    assert records.record(S0).worker_id == W


def test_replaying_the_journal_gives_the_same_records() -> None:
    journal = MemoryJournal()
    first = with_rollout(journal)
    first.bind(first.record(S0), W)
    first.bind(first.record(S1), W)
    first.add_tokens(tokens(S0, 0, 1, 2, end=FinishReason.STOP))
    first.add_tokens(tokens(S1, 0, 3))
    second = backlog(journal)
    second.replay(samples_of)
    for sample_id in (S0, S1, S2):
        assert first.record(sample_id).result() == second.record(sample_id).result()
    assert [r.sample.sample_id for r in second.running_on(W)] == [S1]
    assert second.num_queued == 1
    assert second.num_open == 2


def test_only_the_newest_ended_rollouts_are_kept_and_open_ones_always() -> None:
    journal = MemoryJournal()
    records = backlog(journal, max_kept=1)
    for name in ("open", "old", "new"):
        request = make_request(name, [9])
        records.accept(request, samples_of(request))
        if name != "open":
            records.end(records.record(SampleId(f"{name}/0/0")), FinishReason.ABORT, "")
    request = make_request("next", [9])
    records.accept(request, samples_of(request))
    with pytest.raises(UnknownIdError):
        records.rollout(RolloutId("old"))
    assert not records.rollout(RolloutId("new")).open
    assert records.rollout(RolloutId("open")).open
    assert {entry.rollout_id for entry in journal.entries()} == {"open", "new", "next"}


def test_a_rollout_that_has_just_ended_is_kept_however_many_end() -> None:
    records = backlog(MemoryJournal(), max_kept=1, keep_ended_s=5.0)
    for name in ("a", "b", "c"):
        request = make_request(name, [9])
        records.accept(request, samples_of(request))
        records.end(records.record(SampleId(f"{name}/0/0")), FinishReason.ABORT, "")
    assert not records.rollout(RolloutId("a")).open


def test_a_sample_may_have_its_own_sampling() -> None:
    request = make_request("r", [9])
    own = Sampling(max_tokens=33, temperature=0.0)
    request = RolloutRequest(
        request.rollout_id, request.prompts, 1, request.samplings, 1, sample_samplings=((own,),)
    )
    assert samples_of(request)[0].sampling == own


def test_failures_in_a_row_wait_longer_each_time_and_end() -> None:
    now = 0.0
    attempts = Attempts(3, 1.0, 3.0, lambda: now)
    waits_s = []
    while not attempts.exhausted:
        attempts.fail()
        assert not attempts.may_try
        waits_s.append(attempts.pause_s)
    assert waits_s == [1.0, 2.0, 3.0]
    now = 99.0
    assert not attempts.may_try
    attempts.reset()
    assert attempts.may_try


def test_a_sample_is_measured_from_its_acceptance_and_between_its_reports() -> None:
    now = [10.0]
    ledger = LeaseLedger(0.0)
    telemetry = Telemetry(lambda: ledger.totals(0.0))
    records = Backlog(CoordinatorSettings(), MemoryJournal(), ledger, telemetry, lambda: now[0])
    request = make_request("r", [9])
    records.accept(request, samples_of(request))
    now[0] = 12.0
    records.bind(records.record(S0), W)
    now[0] = 15.0
    records.add_tokens(tokens(S0, 0, 1))
    now[0] = 16.0
    records.add_tokens(tokens(S0, 1, 2, 3))
    records.let_go(S0, W)
    records.bind(records.record(S0), WorkerId(6))
    now[0] = 20.0
    records.add_tokens(tokens(S0, 3, 4, end=FinishReason.STOP))

    def observed(name: str) -> tuple[float, float]:
        read = telemetry.registry.get_sample_value
        return read(f"flexfloor_{name}_count") or 0, read(f"flexfloor_{name}_sum") or 0

    assert observed("queue_seconds") == (1, 2.0), "waiting again after a move is no queueing"
    assert observed("first_token_seconds") == (1, 5.0)
    assert observed("token_gap_seconds") == (2, 0.5 + 4.0)
    assert observed("sample_seconds") == (1, 10.0)


def test_what_was_asked_beside_tokens_is_kept_once_and_outlives_the_coordinator() -> None:
    journal = MemoryJournal()
    records = with_rollout(journal)
    records.bind(records.record(S0), W)
    layout = RoutingLayout(layers=1, top_k=1, dtype="uint8")
    whole = TokenDetail((((7, -1.0),), ((8, -2.0),)), (b"\x01\x02\x03", b"\x04"), layout)
    records.add_tokens(replace(tokens(S0, 0, 1), detail=whole.cut(0, 1)))
    records.add_tokens(replace(tokens(S0, 0, 1, 2), detail=whole))
    assert records.record(S0).result().detail == whole
    later = backlog(journal)
    later.replay(samples_of)
    assert later.record(S0).result().detail == whole
    news = later.record(S0).news(1)
    assert news is not None
    assert news.detail == whole.cut(1)
