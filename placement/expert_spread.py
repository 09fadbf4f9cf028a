"""Which experts change their owner, and to whom, once it is settled how many.

Within a node before between nodes, then so that every member's share of the routed tokens comes
close to its share of the experts. Both are greedy: an expert's load changes from batch to batch by
more than a better assignment would gain.

Shapes: E = experts per layer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.errors import PlanError
from placement.ids import ExpertId, WorkerId
from placement.membership import ExpertMove


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """What is known beyond who owns what. Whatever is left out counts as equal for all.

    Attributes:
        load_E: routed tokens of each expert, in any unit; empty if unknown.
        node_of: the node of a worker; workers of one node move experts among themselves first.
        share_of: how much of the experts a worker takes, relative to 1: a worker of two GPUs
            takes 2, one with half the memory to spare 0.5.
    """

    load_E: Sequence[float] = ()
    node_of: Mapping[WorkerId, str] = field(default_factory=dict)
    share_of: Mapping[WorkerId, float] = field(default_factory=dict)

    def check(self, num_experts: int) -> None:
        """Raises:
        PlanError: loads of another number of experts, or a number that is out of range.
        """
        if self.load_E and len(self.load_E) != num_experts:
            raise PlanError(
                f"has {len(self.load_E)} entries for {num_experts} experts", field="load_E"
            )
        if any(not load >= 0 for load in self.load_E):
            raise PlanError(f"has a negative entry ({min(self.load_E)})", field="load_E")
        for worker_id, share in self.share_of.items():
            if not share > 0:
                raise PlanError(
                    f"is {share} for worker {worker_id}; leave a worker that is to hold nothing "
                    "out of the group",
                    field="share_of",
                )

    def load(self, expert: int) -> float:
        return self.load_E[expert] if self.load_E else 0.0

    def share(self, worker_id: WorkerId) -> float:
        return self.share_of.get(worker_id, 1.0)

    def apart(self, one: WorkerId, other: WorkerId) -> bool:
        """On different nodes, as far as is known."""
        nodes = self.node_of
        return one in nodes and other in nodes and nodes[one] != nodes[other]


NOTHING_KNOWN = ExpertFacts()


def choose_given(experts: Sequence[int], target_count: int, facts: ExpertFacts) -> list[int]:
    """Which experts a worker gives away: its highest, or those that leave it its part of the load.

    Greedy: the next one given is the one after which the mean load of what is kept is closest to
    that of all experts.
    """
    num_given = max(0, len(experts) - target_count)
    if not facts.load_E or target_count == 0 or not num_given:
        return list(experts[len(experts) - num_given :])
    mean_load = sum(facts.load_E) / len(facts.load_E)
    kept, given = list(experts), []
    kept_load = sum(facts.load(e) for e in kept)
    for _ in range(num_given):
        wanted = kept_load - mean_load * (len(kept) - 1)
        expert = min(kept, key=lambda e: (abs(facts.load(e) - wanted), -e))
        kept.remove(expert)
        kept_load -= facts.load(expert)
        given.append(expert)
    return given


def spread(
    leaving: Mapping[WorkerId, Sequence[int]],
    lacking: dict[WorkerId, int],
    load: dict[WorkerId, float],
    facts: ExpertFacts,
) -> tuple[ExpertMove, ...]:
    """Each leaving expert to a destination that lacks one, heaviest experts first.

    Within the node if a place is left there, then where least load is for the share, then where
    this source has sent least (a leaver sends to all of them at the same time), then where most
    is lacking.
    """
    sent: dict[WorkerId, Counter[WorkerId]] = {w: Counter() for w in leaving}
    order = [(source, expert) for source, experts in leaving.items() for expert in experts]
    order.sort(key=lambda pair: -facts.load(pair[1]))  # stable: as given where loads are equal
    moves = []
    for source, expert in order:
        destination = min(
            lacking,
            key=lambda w: (
                facts.apart(source, w),
                load[w] / facts.share(w),
                sent[source][w],
                -lacking[w],
            ),
        )
        sent[source][destination] += 1
        load[destination] += facts.load(expert)
        lacking[destination] -= 1
        if not lacking[destination]:
            del lacking[destination]
        moves.append(ExpertMove(ExpertId(expert), source, destination))
    return tuple(moves)
