"""Copied or recomputed: what decides."""

import pytest

from placement.sample_moves import (
    CopySpeed,
    MoveChoice,
    MovePolicy,
    MoveReason,
    MoveView,
    choose_move,
)

MIB = 1 << 20
SPEED = CopySpeed(least_s=0.02, s_per_byte=0.01 / MIB)


def _view(
    kv_tokens: int,
    copy_speed: CopySpeed | None = SPEED,
    prefill_s_per_token: float | None = 0.0002,
) -> MoveView:
    return MoveView(kv_tokens, kv_tokens * MIB // 100, copy_speed, prefill_s_per_token)


@pytest.mark.parametrize("policy", list(MovePolicy))
def test_where_there_is_no_kv_it_is_computed(policy: MovePolicy) -> None:
    assert choose_move(_view(0), policy) == MoveChoice(False, MoveReason.NO_KV)


def test_a_fixed_policy_asks_for_no_measurement() -> None:
    unmeasured = _view(100, None, None)
    copied = choose_move(unmeasured, MovePolicy.COPY)
    assert copied == MoveChoice(True, MoveReason.CONFIGURED)
    recomputed = choose_move(unmeasured, MovePolicy.RECOMPUTE)
    assert recomputed == MoveChoice(False, MoveReason.CONFIGURED)


def test_what_was_never_measured_is_tried_by_copying() -> None:
    for view in (_view(100, copy_speed=None), _view(100, prefill_s_per_token=None)):
        assert choose_move(view, MovePolicy.AUTO) == MoveChoice(True, MoveReason.UNMEASURED)


def test_a_short_context_is_recomputed_and_a_long_one_copied_by_cost() -> None:
    # A copy takes 20 ms at least; 100 tokens a millisecond are copied and 5 are computed.
    short, long = _view(90), _view(110)
    assert choose_move(short, MovePolicy.AUTO) == MoveChoice(False, MoveReason.CHEAPER)
    assert choose_move(long, MovePolicy.AUTO) == MoveChoice(True, MoveReason.CHEAPER)


def test_where_prefill_is_fast_nothing_is_copied() -> None:
    fast = _view(100_000, prefill_s_per_token=0.00001)
    assert choose_move(fast, MovePolicy.AUTO) == MoveChoice(False, MoveReason.CHEAPER)
