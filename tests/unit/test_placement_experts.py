from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.experts import check_ownership, initial_owners, plan_group_change
from placement.ids import Generation, WorkerId
from placement.membership import GroupChange


def ids(*numbers: int) -> list[WorkerId]:
    return [WorkerId(n) for n in numbers]


@st.composite
def changes(draw: st.DrawFn) -> tuple[GroupChange, tuple[WorkerId, ...]]:
    """Any change between two memberships, and the owners before it (even or not)."""
    old = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    staying = draw(st.lists(st.sampled_from(old), unique=True))
    joining = draw(st.lists(st.integers(21, 40), max_size=8 - len(staying), unique=True))
    new = draw(st.permutations(staying + joining).filter(bool))
    num_experts = draw(st.integers(max(len(old), len(new)), 24))
    spare = st.lists(
        st.sampled_from(old), min_size=num_experts - len(old), max_size=num_experts - len(old)
    )
    owner_E = tuple(map(WorkerId, draw(st.permutations(old + draw(spare)))))
    return plan_group_change(Generation(1), ids(*old), ids(*new), owner_E), owner_E


@given(changes())
def test_every_expert_has_one_owner_and_counts_differ_by_at_most_one(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    change, _ = case
    check_ownership(change.owner_E, change.new_members)
    counts = [len(change.experts_of(w)) for w in change.new_members]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == len(change.owner_E)


@given(changes())
def test_the_moves_are_exactly_the_changes_of_owner(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    change, owner_E = case
    moved = {m.expert: (m.source, m.destination) for m in change.moves}
    assert len(moved) == len(change.moves)
    for expert, (before, after) in enumerate(zip(owner_E, change.owner_E, strict=True)):
        assert moved.get(expert, (before, before)) == (before, after)
        assert (expert in moved) == (before != after)


@given(changes())
def test_no_even_placement_needs_fewer_moves(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    """Lower bound: of a survivor's experts at most ceil(E / n) stay, and only E % n workers may
    keep that many; everything else has to move."""
    change, owner_E = case
    base, num_larger = divmod(len(owner_E), len(change.new_members))
    held = Counter(owner_E)
    kept = sum(min(held[w], base) for w in change.survivors)
    kept += min(num_larger, sum(held[w] > base for w in change.survivors))
    assert len(change.moves) == len(owner_E) - kept


@given(changes())
def test_ranks_are_survivors_in_their_old_order_and_then_joiners(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    change, _ = case
    assert change.new_members == change.survivors + change.joiners
    assert list(change.survivors) == [w for w in change.old_members if w in change.survivors]


@given(changes())
def test_every_joiner_gets_dense_weights_from_an_old_member_and_the_work_is_shared(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    change, _ = case
    assert tuple(joiner for joiner, _ in change.dense_sources) == change.joiners
    allowed = change.survivors or change.old_members
    sends = Counter(dict.fromkeys(allowed, 0))
    sends.update(source for _, source in change.dense_sources)
    assert set(sends) == set(allowed)
    assert max(sends.values()) - min(sends.values()) <= 1


@given(st.integers(1, 40), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_nobody_takes_an_expert_while_the_group_only_grows(
    num_experts: int, joins: list[int]
) -> None:
    members = ids(0)
    owner_E = initial_owners(num_experts, members)
    for count in joins:
        wanted = ids(*range(min(len(members) + count, num_experts)))
        change = plan_group_change(Generation(1), members, wanted, owner_E)
        assert {m.destination for m in change.moves} <= set(change.joiners)
        members, owner_E = wanted, change.owner_E


@given(changes())
def test_the_same_change_is_planned_the_same_way(
    case: tuple[GroupChange, tuple[WorkerId, ...]],
) -> None:
    change, owner_E = case
    again = plan_group_change(change.generation, change.old_members, change.new_members, owner_E)
    assert again == change


def test_leavers_spread_their_experts_over_all_survivors() -> None:
    old = ids(0, 1, 2, 3)
    change = plan_group_change(Generation(2), old, ids(1, 3), initial_owners(16, old))
    sent = Counter((m.source, m.destination) for m in change.moves)
    assert sent == {(0, 1): 2, (0, 3): 2, (2, 1): 2, (2, 3): 2}


def test_a_swap_gives_the_joiner_what_the_leaver_had() -> None:
    old = ids(0, 1, 2)
    owner_E = initial_owners(8, old)
    change = plan_group_change(Generation(3), old, ids(7, 2, 0), owner_E)
    assert change.new_members == (0, 2, 7)
    assert {(m.source, m.destination) for m in change.moves} == {(1, 7)}
    assert change.owner_E == (0, 0, 0, 7, 7, 7, 2, 2)


def test_a_change_of_everybody_takes_dense_weights_from_the_leavers() -> None:
    change = plan_group_change(Generation(1), ids(0, 1), ids(2, 3, 4), initial_owners(6, ids(0, 1)))
    assert change.dense_sources == ((2, 0), (3, 1), (4, 0))
    assert len(change.moves) == 6


def test_an_uneven_split_goes_on_without_moving_what_may_stay() -> None:
    change = plan_group_change(
        Generation(1), ids(0, 1, 2), ids(0, 1), initial_owners(16, ids(0, 1, 2))
    )
    assert [len(change.experts_of(w)) for w in change.new_members] == [8, 8]
    assert len(change.moves) == 5


@pytest.mark.parametrize(
    ("num_experts", "num_members", "counts"),
    [(16, 4, [4, 4, 4, 4]), (16, 3, [6, 5, 5]), (60, 8, [8, 8, 8, 8, 7, 7, 7, 7]), (5, 1, [5])],
)
def test_a_founding_group_holds_experts_as_vllm_places_them_linearly(
    num_experts: int, num_members: int, counts: list[int]
) -> None:
    owners = initial_owners(num_experts, ids(*range(num_members)))
    assert owners == tuple(rank for rank, count in enumerate(counts) for _ in range(count))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "at least one member"),
        ([1, 1], "worker 1 is named more than once"),
        ([0, 1, 2, 3, 4], "5 members cannot share 4 experts"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_name(members: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message) as founding:
        initial_owners(4, ids(*members))
    assert founding.value.field == "members"
    with pytest.raises(PlanError, match=message) as change:
        plan_group_change(Generation(1), ids(0), ids(*members), ids(0, 0, 0, 0))
    assert change.value.field == "new_members"


def test_an_expert_of_nobody_is_found() -> None:
    with pytest.raises(PlanError, match="expert 2 is owned by worker 9"):
        check_ownership(ids(0, 1, 9), ids(0, 1))


def test_a_member_without_experts_is_found() -> None:
    with pytest.raises(PlanError, match="worker 1 owns none of 3 experts"):
        check_ownership(ids(0, 0, 0), ids(0, 1))


def test_experts_of_a_lost_worker_are_not_planned_to_move() -> None:
    with pytest.raises(PlanError, match="recover it from a copy"):
        plan_group_change(Generation(1), ids(0, 1), ids(0), ids(0, 1, 2))
