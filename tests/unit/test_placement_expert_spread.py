import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.expert_spread import ExpertFacts
from placement.experts import check_ownership, initial_owners, plan_group_change
from placement.ids import Generation, WorkerId
from placement.membership import GroupChange


def first(count: int) -> list[WorkerId]:
    return [WorkerId(n) for n in range(count)]


def loads_of(change: GroupChange, load_E: list[float]) -> dict[WorkerId, float]:
    return {w: sum(load_E[e] for e in change.experts_of(w)) for w in change.new_members}


def test_heavy_experts_of_a_leaver_are_spread_by_load() -> None:
    owner_E = initial_owners(16, first(4))
    load_E = [1.0] * 12 + [9.0, 8.0, 2.0, 1.0]  # the last worker's, which leaves
    facts = ExpertFacts(load_E=load_E)
    change = plan_group_change(Generation(1), first(4), first(3), owner_E, facts)
    loads = loads_of(change, load_E)
    # The heaviest two go to two workers; who takes a second expert gets the lightest.
    assert sorted(loads.values()) == [6.0, 12.0, 14.0]
    assert len(change.moves) == 4


def test_a_survivor_gives_a_joiner_what_leaves_both_their_part_of_the_load() -> None:
    load_E = [5.0, 1.0, 5.0, 1.0]
    facts = ExpertFacts(load_E=load_E)
    owner_E = initial_owners(4, first(1))
    change = plan_group_change(Generation(1), first(1), first(2), owner_E, facts)
    assert set(loads_of(change, load_E).values()) == {6.0}


def test_experts_stay_within_their_node_while_it_has_room() -> None:
    node_of = {w: "a" if w < 3 else "b" for w in first(6)}
    facts = ExpertFacts(node_of=node_of)
    owner_E = initial_owners(24, first(6))
    stay = [WorkerId(w) for w in (0, 1, 3, 4)]
    change = plan_group_change(Generation(1), first(6), stay, owner_E, facts)
    assert len(change.moves) == 8
    assert all(node_of[m.source] == node_of[m.destination] for m in change.moves)


def test_a_worker_with_twice_the_share_holds_twice_the_experts() -> None:
    facts = ExpertFacts(share_of={WorkerId(0): 2.0})
    owner_E = initial_owners(12, first(4))
    change = plan_group_change(Generation(1), first(4), first(3), owner_E, facts)
    assert [len(change.experts_of(w)) for w in first(3)] == [6, 3, 3]


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        (ExpertFacts(load_E=[1.0]), "load_E"),
        (ExpertFacts(load_E=[-1.0] * 12), "load_E"),
        (ExpertFacts(share_of={WorkerId(0): 0.0}), "share_of"),
    ],
)
def test_facts_that_do_not_fit_are_an_error(facts: ExpertFacts, field: str) -> None:
    owner_E = initial_owners(12, first(4))
    with pytest.raises(PlanError) as caught:
        plan_group_change(Generation(1), first(4), first(3), owner_E, facts)
    assert caught.value.field == field


@given(data=st.data())
def test_whatever_is_known_every_expert_has_one_owner_and_no_move_is_wasted(
    data: st.DataObject,
) -> None:
    old = first(data.draw(st.integers(1, 6)))
    new = data.draw(st.lists(st.sampled_from(first(8)), min_size=1, max_size=6, unique=True))
    num_experts = data.draw(st.integers(8, 24))
    owner_E = initial_owners(num_experts, old)
    facts = ExpertFacts(
        load_E=data.draw(st.lists(st.floats(0, 9), min_size=num_experts, max_size=num_experts)),
        node_of={w: data.draw(st.sampled_from("ab")) for w in first(8)},
    )
    plain = plan_group_change(Generation(1), old, new, owner_E)
    change = plan_group_change(Generation(1), old, new, owner_E, facts)
    check_ownership(change.owner_E, change.new_members)
    assert len(change.moves) == len(plain.moves)
    assert len({m.expert for m in change.moves}) == len(change.moves)
    assert all(owner_E[m.expert] == m.source for m in change.moves)
