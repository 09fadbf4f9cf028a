import math
import time

from hypothesis import given
from hypothesis import strategies as st

from actors.accounting import LeaseLedger, SlotUse
from placement.ids import RolloutId

A, B = RolloutId("a"), RolloutId("b")

ACTIONS = st.lists(
    st.tuples(
        st.floats(0, 1000),
        st.sampled_from(["lease", "release", "tokens a", "tokens b", "open b", "end b", "use"]),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_the_parts_add_up_to_peak_times_span_whatever_happens(
    actions: list[tuple[float, str]],
) -> None:
    ledger = LeaseLedger(0.0)
    now = 0.0
    ledger.open(A, now)
    b_opened = b_open = False
    for wait_s, action in actions:
        now += wait_s
        if action == "lease":
            ledger.lease(1, now)
        elif action == "release" and ledger.leased:
            ledger.lease(-1, now)
        elif action == "use":
            ledger.set_used(wait_s % 3, now)
        elif action == "open b" and not b_opened:
            ledger.open(B, now)
            b_opened = b_open = True
        elif action == "end b" and b_open:
            ledger.end(B, now)
            b_open = False
        elif action == "tokens a" or (action == "tokens b" and b_open):
            ledger.tokens(A if action == "tokens a" else B, 3)
    usages = [ledger.usage(A, now)] + ([ledger.usage(B, now)] if b_opened else [])
    for usage in usages:
        parts_s = (
            usage.occupied_worker_s
            + usage.freed_worker_s
            + usage.not_yet_leased_worker_s
            + usage.shared_worker_s
        )
        assert math.isclose(parts_s, usage.peak_slots * usage.span_s, abs_tol=1e-6)
        assert usage.used_worker_s <= usage.freed_worker_s + 1e-6
        assert b_opened or usage.shared_worker_s == 0
    occupied_s = sum(usage.occupied_worker_s for usage in usages)
    assert math.isclose(occupied_s, ledger.totals(now).occupied_worker_s, abs_tol=1e-6)


def test_a_slot_is_occupied_freed_or_not_yet_leased_at_each_moment() -> None:
    ledger = LeaseLedger(0.0)
    ledger.lease(2, 0.0)
    ledger.open(A, 10.0)
    ledger.lease(1, 14.0)
    ledger.lease(-2, 20.0)
    ledger.set_used(1, 22.0)
    ledger.end(A, 30.0)
    usage = ledger.usage(A, 99.0)
    assert usage.peak_slots == 3
    assert usage.span_s == 20
    assert usage.occupied_worker_s == 4 * 2 + 6 * 3 + 10 * 1
    assert usage.freed_worker_s == 10 * 2
    assert usage.used_worker_s == 8
    assert usage.not_yet_leased_worker_s == 4


def test_rollouts_that_overlap_split_the_time_by_their_tokens() -> None:
    ledger = LeaseLedger(0.0)
    ledger.lease(4, 0.0)
    ledger.open(A, 0.0)
    ledger.open(B, 10.0)
    ledger.tokens(A, 30)
    ledger.tokens(B, 10)
    ledger.step(8)
    ledger.end(A, 20.0)
    ledger.end(B, 25.0)
    assert ledger.usage(A, 25.0).occupied_worker_s == 10 * 4 + 10 * 4 * 0.75
    assert ledger.usage(B, 25.0).occupied_worker_s == 10 * 4 * 0.25 + 5 * 4
    assert ledger.usage(A, 25.0).occupied_worker_steps == 24
    assert ledger.usage(B, 25.0).occupied_worker_steps == 8
    assert ledger.usage(A, 25.0).steps == ledger.usage(B, 25.0).steps == 8


def test_asking_in_between_changes_nothing() -> None:
    answers = []
    for asks in (0, 7):
        ledger = LeaseLedger(0.0)
        ledger.lease(3, 0.0)
        ledger.open(A, 0.0)
        ledger.open(B, 0.0)
        for second in range(asks):
            ledger.tokens(A, 1)
            ledger.usage(A, float(second))
            ledger.totals(float(second))
        ledger.tokens(A, 7 - asks)
        ledger.tokens(B, 14)
        ledger.end(A, 10.0)
        answers.append(ledger.usage(A, 10.0))
    assert answers[0] == answers[1]


def test_used_is_what_others_gained_since_the_release_and_no_more_than_was_freed_there() -> None:
    use = SlotUse()
    use.released("a", {"a": 1.0, "b": 0.0})
    assert use.used({"a": 1.0, "b": 3.0}) == 0
    assert use.used({"a": 2.5, "b": 3.0}) == 1
    use.released("a", {"a": 2.5, "b": 3.0})
    assert use.used({"a": 2.5, "b": 3.0}) == 1.5
    use.leased("a")
    use.leased("a")
    assert not use.watching
    assert use.used({"a": 9.0, "b": 9.0}) == 0


def test_many_open_rollouts_are_booked_in_time_that_grows_with_them_and_not_faster() -> None:
    """As of a batch that comes as a rollout per sample; in CPU time, whatever else runs here."""

    def cpu_s(num_rollouts: int) -> float:
        ledger = LeaseLedger(0.0)
        ledger.lease(1, 0.0)
        for number in range(num_rollouts):
            ledger.open(RolloutId(str(number)), 1.0)
        began_s = time.thread_time()
        for change in range(20):
            ledger.tokens(RolloutId(str(change)), 3)
            ledger.set_used(0.0, 2.0 + change)
        return time.thread_time() - began_s

    cpu_s(100)
    assert cpu_s(1600) < 4 * 16 * max(cpu_s(100), 1e-4)
