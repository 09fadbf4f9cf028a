"""A change of the group: what it consists of, and the one routine it goes through.

Shrink, grow and swap are one change: some workers join, some leave, experts move so that
every expert has exactly one owner again. The routine::

    BUILD -> PREPARE -> PAUSE -> COMMIT -> FINALIZE -> DONE
      \\________\\________\\________\\____-> ROLLED_BACK

Until FINALIZE the old membership can be restored. The machine only records and checks the
order; ``actors`` performs the phases.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from placement.errors import PlanError
from placement.ids import ExpertId, Generation, WorkerId


@dataclass(frozen=True, slots=True)
class Placement:
    """Who belongs to the group, and who owns which expert.

    Attributes:
        members: in rank order.
        owner_E: owner of each expert, the same in every layer (E = experts per layer).
    """

    members: tuple[WorkerId, ...]
    owner_E: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """One expert, in every layer, goes from ``source`` to ``destination``."""

    expert: ExpertId
    source: WorkerId
    destination: WorkerId


@dataclass(frozen=True, slots=True)
class GroupChange:
    """All that the members need to know of one change.

    Attributes:
        generation: number of the membership that it makes.
        old_members, new_members: in rank order; a worker's rank is its index.
        moves: experts that change their owner.
        owner_E: owner of each expert afterwards, the same in every layer
            (E = experts per layer).
        dense_sources: (joiner, member that sends it the dense weights).
        weight_version: that the old members have, and so the joiners get.
    """

    generation: Generation
    old_members: tuple[WorkerId, ...]
    new_members: tuple[WorkerId, ...]
    moves: tuple[ExpertMove, ...]
    owner_E: tuple[WorkerId, ...]
    dense_sources: tuple[tuple[WorkerId, WorkerId], ...]
    weight_version: str = "0"

    @property
    def joiners(self) -> tuple[WorkerId, ...]:
        return tuple(w for w in self.new_members if w not in self.old_members)

    @property
    def leavers(self) -> tuple[WorkerId, ...]:
        return tuple(w for w in self.old_members if w not in self.new_members)

    @property
    def survivors(self) -> tuple[WorkerId, ...]:
        return tuple(w for w in self.new_members if w in self.old_members)

    def experts_of(self, worker_id: WorkerId) -> tuple[ExpertId, ...]:
        """Experts that ``worker_id`` holds afterwards, ascending."""
        return tuple(ExpertId(e) for e, owner in enumerate(self.owner_E) if owner == worker_id)


class Phase(StrEnum):
    BUILD = "build"
    PREPARE = "prepare"
    PAUSE = "pause"
    COMMIT = "commit"
    FINALIZE = "finalize"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


_NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.BUILD: (Phase.PREPARE, Phase.ROLLED_BACK),
    Phase.PREPARE: (Phase.PAUSE, Phase.ROLLED_BACK),
    Phase.PAUSE: (Phase.COMMIT, Phase.ROLLED_BACK),
    Phase.COMMIT: (Phase.FINALIZE, Phase.ROLLED_BACK),
    Phase.FINALIZE: (Phase.DONE,),
    Phase.DONE: (),
    Phase.ROLLED_BACK: (),
}


@dataclass(slots=True)
class ChangeProgress:
    """Where one change stands. ``entered_s`` holds the caller's clock at each phase."""

    phase: Phase
    entered_s: dict[Phase, float] = field(default_factory=dict)
    error: str = ""

    @classmethod
    def begin(cls, now_s: float) -> "ChangeProgress":
        return cls(Phase.BUILD, {Phase.BUILD: now_s})

    def enter(self, phase: Phase, now_s: float, error: str = "") -> None:
        """Go on to ``phase``.

        Raises:
            PlanError: the routine has no such step.
        """
        if phase not in _NEXT[self.phase]:
            raise PlanError(f"a change in phase {self.phase} cannot go on to {phase}")
        self.phase = phase
        self.entered_s[phase] = now_s
        self.error = error

    @property
    def ended(self) -> bool:
        return not _NEXT[self.phase]
