"""The members of a simulated group, the experts they own, and how long each slot was leased.

Changes go through the same plan and the same machine as on real workers, so that a rule which
asks for something impossible fails here too.
"""

from collections.abc import Sequence

import numpy as np

from placement.experts import initial_owners, plan_group_change
from placement.ids import Generation, WorkerId
from placement.membership import ChangeProgress, GroupChange, Phase
from placement.simulate.outcome import Occupation
from placement.simulate.workload import Ints

_ROUTINE = (Phase.PREPARE, Phase.PAUSE, Phase.COMMIT, Phase.FINALIZE, Phase.DONE)


class SimulatedGroup:
    """Attributes:
    members: in rank order.
    free_slots: slots that nobody of the group is on.
    """

    def __init__(self, slots: Sequence[int], num_slots: int, num_experts: int, now_s: float):
        self._num_experts = num_experts
        self._next_id = 0
        self._generation = 0
        self._since_s: dict[WorkerId, float] = {}
        self.slot_of: dict[WorkerId, int] = {}
        self.free_slots = list(range(num_slots))
        self.past: list[Occupation] = []
        self.members = tuple(self._arrive(slot, now_s) for slot in slots)
        self._owner_E = initial_owners(num_experts, self.members)

    @property
    def width(self) -> int:
        return len(self.members)

    def ids(self) -> Ints:
        return np.array(self.members, np.int64)

    def plan(self, leavers: Sequence[WorkerId], joining_slots: Sequence[int]) -> GroupChange:
        """The change to a group without the leavers and with workers on these slots."""
        joiners = [WorkerId(self._next_id + i) for i in range(len(joining_slots))]
        staying = [w for w in self.members if w not in set(leavers)]
        return plan_group_change(
            Generation(self._generation + 1), self.members, [*staying, *joiners], self._owner_E
        )

    def carry_out(
        self, change: GroupChange, joining_slots: Sequence[int], begun_s: float, ended_s: float
    ) -> None:
        """Slots of joiners are occupied from ``begun_s``, those of leavers until ``ended_s``."""
        progress = ChangeProgress.begin(begun_s)
        for slot in joining_slots:
            self._arrive(slot, begun_s)
        for phase in _ROUTINE:
            progress.enter(phase, ended_s)
        for worker_id in change.leavers:
            self._leave(worker_id, ended_s)
        self.members = change.new_members
        self._owner_E = change.owner_E
        self._generation = change.generation

    def found_again(self, now_s: float, ready_s: float) -> None:
        """Everybody ends; as many new workers take the same slots at once, and load until
        ``ready_s``."""
        slots = [self.slot_of[worker_id] for worker_id in self.members]
        for worker_id in self.members:
            self._leave(worker_id, now_s)
        self.members = tuple(self._arrive(slot, now_s) for slot in slots)
        self._owner_E = initial_owners(self._num_experts, self.members)
        self._generation += 1

    def end(self, now_s: float) -> tuple[Occupation, ...]:
        """All that were leased, the members until now."""
        present = [self._occupation(worker_id, now_s) for worker_id in self.members]
        return tuple(sorted([*self.past, *present], key=lambda o: (o.slot, o.from_s)))

    def _arrive(self, slot: int, now_s: float) -> WorkerId:
        worker_id = WorkerId(self._next_id)
        self._next_id += 1
        self.free_slots.remove(slot)
        self.slot_of[worker_id] = slot
        self._since_s[worker_id] = now_s
        return worker_id

    def _leave(self, worker_id: WorkerId, now_s: float) -> None:
        self.past.append(self._occupation(worker_id, now_s))
        self.free_slots.append(self.slot_of.pop(worker_id))
        del self._since_s[worker_id]

    def _occupation(self, worker_id: WorkerId, until_s: float) -> Occupation:
        return Occupation(worker_id, self.slot_of[worker_id], self._since_s[worker_id], until_s)
