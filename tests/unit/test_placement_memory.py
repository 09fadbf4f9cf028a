from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.memory import (
    MemoryBudget,
    floor_workers,
    floor_workers_with_running,
    kv_tokens_at_width,
)
from tests.unit.fake_group import budgets


def widths(budget: MemoryBudget) -> tuple[int, ...]:
    return kv_tokens_at_width(
        budget.num_experts,
        budget.max_workers,
        budget.expert_bytes,
        budget.kv_block_bytes,
        budget.kv_block_tokens,
        budget.kv_memory_bytes,
    )


def test_a_narrow_group_gives_up_whole_blocks_for_its_experts() -> None:
    # 100 blocks of 10 bytes; an expert takes 25 bytes. Experts held: 16, 8, 6, 4.
    tokens = kv_tokens_at_width(
        num_experts=16,
        max_workers=4,
        expert_bytes=25,
        kv_block_bytes=10,
        kv_block_tokens=16,
        kv_memory_bytes=1009,
    )
    assert tokens == (0, (100 - 30 - 1) * 16, (100 - 10 - 1) * 16, (100 - 5 - 1) * 16, 99 * 16)


def test_no_kv_is_left_where_the_experts_do_not_fit() -> None:
    assert kv_tokens_at_width(8, 4, 100, 10, 16, 500) == (0, 0, 29 * 16, 39 * 16, 49 * 16)
    assert kv_tokens_at_width(8, 4, 100, 10, 16, 200) == (0, 0, 0, 9 * 16, 19 * 16)


def test_the_null_block_holds_no_token() -> None:
    assert kv_tokens_at_width(1, 1, 1, 10, 16, 10) == (0, 0)
    assert kv_tokens_at_width(1, 1, 1, 10, 16, 20) == (0, 16)


@given(budgets())
def test_more_workers_never_leave_less_kv(budget: MemoryBudget) -> None:
    tokens = widths(budget)
    assert len(tokens) == budget.max_workers + 1
    assert all(narrow <= wide for narrow, wide in pairwise(tokens))
    assert all(n % budget.kv_block_tokens == 0 for n in tokens)


@given(budgets(), st.integers(1, 6))
def test_experts_and_kv_stay_within_the_memory(budget: MemoryBudget, width: int) -> None:
    width = min(width, budget.max_workers)
    extra = budget.experts_at(width) - budget.experts_at(budget.max_workers)
    if budget.kv_tokens_at(width):
        used_bytes = budget.kv_memory_bytes_at(width) + extra * budget.expert_bytes
        assert used_bytes <= budget.kv_memory_bytes
        assert budget.kv_memory_bytes - used_bytes < 2 * budget.kv_block_bytes


@given(budgets(), st.integers(1, 200))
def test_the_floor_is_the_first_width_with_room_for_a_full_sample(
    budget: MemoryBudget, max_model_len: int
) -> None:
    tokens = widths(budget)
    floor = floor_workers(tokens, max_model_len)
    enough = [w for w in range(1, len(tokens)) if tokens[w] >= max_model_len]
    assert floor == (enough[0] if enough else None)


@given(budgets(), st.lists(st.integers(1, 50), max_size=20), st.integers(1, 6))
def test_running_samples_only_raise_the_floor(
    budget: MemoryBudget, running: list[int], max_samples: int
) -> None:
    tokens = widths(budget)
    alone = floor_workers(tokens, 10)
    floor = floor_workers_with_running(tokens, 10, running, max_samples, budget.kv_block_tokens)
    if floor is not None:
        assert alone is not None
        assert floor >= alone
        assert floor * tokens[floor] >= sum(running)
        assert floor * max_samples >= len(running)


def test_running_samples_are_packed_and_not_summed() -> None:
    tokens = (0, 40, 40, 40)
    assert floor_workers_with_running(tokens, 30, [25, 15, 25, 15], 4) == 2
    assert floor_workers_with_running(tokens, 30, [25, 25, 25], 4) == 3
    assert floor_workers_with_running(tokens, 30, [1, 1, 1], 1) == 3
    assert floor_workers_with_running(tokens, 30, [25] * 4, 4) is None
    assert floor_workers_with_running(tokens, 50, [], 4) is None


def test_an_explanation_names_what_is_needed_and_what_is_there() -> None:
    budget = MemoryBudget(16, 4, 25, 10, 16, 1000)
    assert budget.explain(1, 1200) == (
        "at width 1 a worker holds up to 16 experts, 12 more than at width 4: they need 300 "
        "bytes, and 1200 KV tokens need 760 bytes (76 blocks with the null block); of 1060 bytes "
        "needed, 1000 are there, room for 1104 KV tokens"
    )


@pytest.mark.parametrize(
    ("field", "budget"),
    [
        ("max_workers", (4, 5, 1, 1, 1, 1)),
        ("max_workers", (4, 0, 1, 1, 1, 1)),
        ("num_experts", (0, 1, 1, 1, 1, 1)),
        ("expert_bytes", (4, 2, -1, 1, 1, 1)),
        ("kv_block_bytes", (4, 2, 1, 0, 1, 1)),
        ("kv_block_tokens", (4, 2, 1, 1, 0, 1)),
        ("kv_memory_bytes", (4, 2, 1, 1, 1, -1)),
    ],
)
def test_a_budget_out_of_range_is_refused_by_field(
    field: str, budget: tuple[int, int, int, int, int, int]
) -> None:
    with pytest.raises(PlanError) as refused:
        kv_tokens_at_width(*budget)
    assert refused.value.field == field


@pytest.mark.parametrize("width", [0, 5])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    with pytest.raises(PlanError, match="not between 1 and 4"):
        MemoryBudget(16, 4, 25, 10, 16, 1000).kv_tokens_at(width)
