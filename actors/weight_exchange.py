"""The group gets other weights: while nobody decodes all members load them, or all have those of
before again.

It runs as a turn of the loop that steers the group (``actors.standstill``). Invariants:

    - No token is decoded by a group whose members have different weights: all are held from before
      the first load until after the last one.
    - Whatever ends it half-way, the version before serves on: loaded again on every member, or by
      a group that is founded afresh with it.
    - What is to be committed is recorded before anybody loads it, so a coordinator that comes back
      knows that this group may be of two minds, and begins afresh.
"""

import logging
from collections.abc import Callable
from typing import Any

from actors.concurrently import each_of
from actors.crew import Crew
from actors.holding import Holding, HoldReason
from actors.roster import Worker
from actors.weights_keeper import ServedVersion, StagedWeights, WeightsKeeper
from placement.errors import (
    FlexFloorError,
    UnavailableError,
    WeightUpdateError,
    WorkerLostError,
)

_log = logging.getLogger(__name__)


class WeightExchange:
    """Args:
    lose_group: give the group up; it is founded afresh with the version that is served.
    """

    def __init__(
        self,
        crew: Crew,
        keeper: WeightsKeeper,
        holding: Holding,
        lose_group: Callable[[str], None],
    ) -> None:
        self._crew = crew
        self._keeper = keeper
        self._holding = holding
        self._lose_group = lose_group
        self.phases_s: dict[str, float] = {}
        """Of the last exchange."""

    async def replace(self, new: ServedVersion, staged: StagedWeights) -> None:
        """Raises: WeightUpdateError: what was served before is served again."""
        roster = self._crew.roster
        members = roster.member_workers()
        roster.next_weights = new
        self.phases_s = {}
        started_at = self._crew.clock()
        try:
            await self._crew.store.record(roster.record_again())
            if members:
                await self._holding.hold(HoldReason.WEIGHTS)
                loading_since = self._lap("hold", started_at)
                await self._load(members, new.version, staged.chunks)
                self._lap("load", loading_since)
        except FlexFloorError as error:
            roster.next_weights = None
            await self._take_back(members, staged, error)
            raise WeightUpdateError(
                f"version {new.version} did not get to every worker: {error}; version "
                f"{roster.weights.version} serves on"
            ) from error
        committing_since = self._crew.clock()
        await self._commit(new)
        held_until = self._lap("commit", committing_since)
        if members:
            self._crew.telemetry.weight_hold_s.observe(held_until - started_at)
        await self._decode_on(members)

    async def _load(self, members: list[Worker], version: str, chunks: tuple[Any, ...]) -> None:
        """Raises: the gravest of the members' failures, after all of them have ended."""
        outcomes = await each_of(worker.live.load_weights(version, chunks) for worker in members)
        failures = [outcome for outcome in outcomes if isinstance(outcome, FlexFloorError)]
        for failure in sorted(failures, key=lambda f: not isinstance(f, WorkerLostError)):
            raise failure

    async def _take_back(
        self, members: list[Worker], staged: StagedWeights, error: FlexFloorError
    ) -> None:
        lost = str(error) if isinstance(error, WorkerLostError) else ""
        before = self._crew.roster.weights.version
        if not lost and members:
            try:
                if staged.previous is None:
                    raise WeightUpdateError(f"nobody has version {before} any more")
                await self._load(members, before, staged.previous)
            except FlexFloorError as second:
                lost = f"{error}; on the way back: {second}"
        if lost:
            self._lose_group(lost)
        await self._decode_on(members)

    async def _commit(self, new: ServedVersion) -> None:
        """Everybody has them, so they are served whatever becomes of the copy."""
        roster = self._crew.roster
        try:
            copy_bytes = (await self._keeper.commit(new.version)).num_bytes
        except UnavailableError as error:
            _log.error("the full copy of version %s is lost: %s", new.version, error)
            copy_bytes = 0
        roster.weights, roster.next_weights = new, None
        self._crew.telemetry.serve_weights(new.version, copy_bytes)

    async def _decode_on(self, members: list[Worker]) -> None:
        """Members that cannot be told are lost, and so is the group."""
        try:
            await self._crew.store.record(self._crew.roster.record_again())
            await self._holding.let_go(HoldReason.WEIGHTS)
        except FlexFloorError as error:
            if members:
                self._lose_group(str(error))

    def _lap(self, phase: str, since: float) -> float:
        now = self._crew.clock()
        self.phases_s[phase] = now - since
        return now
