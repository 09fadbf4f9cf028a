"""Which worker owns which expert, and the fewest moves from one membership to the next.

The owner of an expert is the same in every layer. After a change every expert has exactly one
owner, and every member as many as its share says; with equal shares the counts of two members
differ by at most one.

How many move is as little as these counts allow. Which ones move, and where to, is free beyond
that (``placement.expert_spread``).

Shapes: E = experts per layer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from placement.errors import PlanError
from placement.expert_spread import NOTHING_KNOWN, ExpertFacts, choose_given, spread
from placement.ids import Generation, WorkerId
from placement.membership import GroupChange


def initial_owners(num_experts: int, members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Owner of each expert in a group that starts: contiguous, the first ranks hold one more.

    Source: vLLM's ``determine_expert_map`` with the "linear" strategy; an engine that is built
    by itself loads exactly these experts, so a founder has nothing to move.

    Args:
        members: in rank order.

    Raises:
        PlanError: no members, an id twice, or more members than experts.
    """
    _check_members(members, num_experts, "members")
    base, num_larger = divmod(num_experts, len(members))
    return tuple(
        worker_id
        for rank, worker_id in enumerate(members)
        for _ in range(base + (rank < num_larger))
    )


def check_ownership(owner_E: Sequence[WorkerId], members: Sequence[WorkerId]) -> None:
    """Every expert is owned by a member, and every member owns at least one.

    Raises:
        PlanError: it names the expert or the member at fault.
    """
    _check_members(members, len(owner_E), "members")
    for expert, owner in enumerate(owner_E):
        if owner not in members:
            raise PlanError(
                f"expert {expert} is owned by worker {owner}, which is not one of the members "
                f"{list(members)}; recover it from a copy outside the group first",
                field="owner_E",
            )
    owners = set(owner_E)
    for member in members:
        if member not in owners:
            raise PlanError(
                f"worker {member} owns none of {len(owner_E)} experts; leave it out of the group "
                f"or give it one",
                field="owner_E",
            )


def plan_group_change(
    generation: Generation,
    old_members: Sequence[WorkerId],
    new_members: Sequence[WorkerId],
    owner_E: Sequence[WorkerId],
    facts: ExpertFacts = NOTHING_KNOWN,
) -> GroupChange:
    """The change from ``old_members`` to ``new_members`` that moves the fewest experts.

    A survivor keeps what it may keep; what leavers held, and what survivors have too much, goes
    to whoever lacks experts, each source's share spread over as many destinations as possible
    (a leaver sends to all of them at the same time). The same arguments give the same plan.

    Args:
        generation: number of the membership that the change makes.
        old_members: in rank order.
        new_members: in any order; ranks are survivors in their old order, then joiners as given.
        owner_E: owners in the old membership.

    Raises:
        PlanError: no new members, an id twice, more members than experts, an expert that no old
            member owns, or facts that do not fit.
    """
    facts.check(len(owner_E))
    check_ownership(owner_E, old_members)
    _check_members(new_members, len(owner_E), "new_members")
    survivors = [w for w in old_members if w in new_members]
    joiners = [w for w in new_members if w not in old_members]
    members = (*survivors, *joiners)

    experts_of: dict[WorkerId, list[int]] = {w: [] for w in (*old_members, *joiners)}
    for expert, owner in enumerate(owner_E):
        experts_of[owner].append(expert)
    target = _target_counts(members, {w: len(experts_of[w]) for w in members}, len(owner_E), facts)

    # A leaver's target is nothing.
    leaving = {w: choose_given(experts_of[w], target.get(w, 0), facts) for w in old_members}
    lacking = {w: target[w] - len(experts_of[w]) for w in members}
    load = {
        w: sum(facts.load(e) for e in set(experts_of[w]) - set(leaving.get(w, ()))) for w in members
    }
    moves = spread(leaving, {w: lack for w, lack in lacking.items() if lack > 0}, load, facts)

    new_owner_E = list(owner_E)
    for move in moves:
        new_owner_E[move.expert] = move.destination
    check_ownership(new_owner_E, members)
    dense_sources = survivors or list(old_members)
    return GroupChange(
        generation=generation,
        old_members=tuple(old_members),
        new_members=members,
        moves=moves,
        owner_E=tuple(new_owner_E),
        dense_sources=tuple(
            (joiner, dense_sources[i % len(dense_sources)]) for i, joiner in enumerate(joiners)
        ),
    )


def _target_counts(
    members: Sequence[WorkerId],
    held: Mapping[WorkerId, int],
    num_experts: int,
    facts: ExpertFacts,
) -> dict[WorkerId, int]:
    """Counts by share of which as many as possible are held already.

    Each member's share is rounded down (but not to nothing) to its base, and min(held, base) is
    kept whatever the choice. One of the experts that are left over saves one more move exactly
    where its member holds more than base. Those that save none go to those who hold least,
    joiners first: a survivor that does not have to take an expert keeps its KV for the samples
    that it decodes.
    """
    total = sum(facts.share(w) for w in members)
    base = {w: max(1, int(num_experts * facts.share(w) / total)) for w in members}
    while sum(base.values()) > num_experts:  # small shares were raised to 1
        base[max(members, key=lambda w: base[w])] -= 1
    num_left = num_experts - sum(base.values())
    by_claim = sorted(members, key=lambda w: -held[w] if held[w] > base[w] else held[w])
    return {w: base[w] + (place < num_left) for place, w in enumerate(by_claim)}


def _check_members(members: Sequence[WorkerId], num_experts: int, field: str) -> None:
    if not members:
        raise PlanError(
            "a group needs at least one member; nobody would own the experts", field=field
        )
    twice = [w for w, count in Counter(members).items() if count > 1]
    if twice:
        raise PlanError(
            f"worker {twice[0]} is named more than once in {list(members)}", field=field
        )
    if len(members) > num_experts:
        raise PlanError(
            f"{len(members)} members cannot share {num_experts} experts: each needs at least one; "
            f"use at most {num_experts} workers",
            field=field,
        )
