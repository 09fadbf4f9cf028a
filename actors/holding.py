"""Whether the members of the group decode: not while anybody has a reason that they should not.

Reasons do not know of each other: weights that arrive while the group is paused leave it paused.
"""

from enum import StrEnum

from actors.concurrently import all_of
from actors.crew import Crew


class HoldReason(StrEnum):
    PAUSED = "paused"
    WEIGHTS = "weights"


class Holding:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._reasons: set[HoldReason] = set()

    @property
    def reasons(self) -> frozenset[HoldReason]:
        return frozenset(self._reasons)

    async def hold(self, reason: HoldReason) -> None:
        """Returns when nobody decodes. Idempotent; call it between two changes of the group.

        Raises: WorkerLostError: a member does not answer.
        """
        self._reasons.add(reason)
        await self.hold_members()

    async def let_go(self, reason: HoldReason) -> None:
        """The members decode on, unless somebody else holds them. Idempotent.

        Raises: WorkerLostError: a member does not answer.
        """
        self._reasons.discard(reason)
        if not self._reasons:
            members = self._crew.roster.member_workers()
            await all_of(worker.live.unhold() for worker in members)

    async def hold_members(self) -> None:
        """Members that have just come know of no reason yet.

        Raises: WorkerLostError: a member does not answer.
        """
        if self._reasons:
            members = self._crew.roster.member_workers()
            await all_of(worker.live.hold() for worker in members)
