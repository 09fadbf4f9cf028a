"""What the control routes of all dialects share: waiting until what was asked for is so, versions
that the caller did not name, and parts of an update.

A pause or a waking goes on when its client has gone; asking again joins it.
"""

import re
import time

from fastapi import Request

from actors.control_api import (
    DiskWeights,
    GroupWeights,
    ObjectWeights,
    PauseMode,
    PausePort,
    PauseStatus,
    ServingState,
    WeightStatus,
    WeightUpdate,
)
from placement.errors import UnavailableError
from service.intake import Intake
from service.watch import ClientWatch

RANKS_FOR_WEIGHTS = 1
"""What the service is in a trainer's group for weights, however wide its own group is."""
NO_TENSORS = ObjectWeights(())
"""Of a part that only begins or ends an update."""


async def until_settled(
    coordinator: PausePort, status: PauseStatus, *, bound_s: float, poll_s: float
) -> PauseStatus:
    """How it is once the group is no more on its way to another state.

    Raises: UnavailableError, after ``bound_s``.
    """
    deadline_s = time.monotonic() + bound_s
    while status.on_its_way:
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the group is still {status.state} after {bound_s:g} s; it waits for "
                f"{status.waiting_for}; ask again, or raise service.max_wait_s"
            )
        status = await coordinator.pause_status(poll_s)
    return status


class Control:
    def __init__(self, intake: Intake) -> None:
        self._coordinator = intake.coordinator
        self._settings = intake.settings

    async def pause(self, request: Request, mode: PauseMode) -> PauseStatus:
        """Returns when it is paused (or asleep, which is more).

        Raises: UnavailableError, after ``service.max_wait_s``.
        """
        return await self._settled(request, await self._coordinator.pause(mode))

    async def sleep(self, request: Request, mode: PauseMode) -> PauseStatus:
        """Returns when every lease has gone back. Raises: UnavailableError, as ``pause``."""
        return await self._settled(request, await self._coordinator.sleep(mode))

    async def wake(self, request: Request, *, stay_paused: bool) -> PauseStatus:
        """Returns when it serves, or stands still with a group.

        Raises: UnavailableError: there is no group, and why.
        """
        status = await self._coordinator.wake(stay_paused=stay_paused)
        status = await self._settled(request, status)
        if status.state is ServingState.ASLEEP:
            raise UnavailableError(f"the group is asleep; it could not be woken: {status.error}")
        return status

    async def _settled(self, request: Request, status: PauseStatus) -> PauseStatus:
        async with ClientWatch(request.receive) as watch:
            return await watch.first(self._until_settled(status))

    async def _until_settled(self, status: PauseStatus) -> PauseStatus:
        return await until_settled(
            self._coordinator,
            status,
            bound_s=self._settings.max_wait_s,
            poll_s=self._settings.poll_wait_s,
        )

    async def update(
        self, source: DiskWeights | ObjectWeights | GroupWeights, version: str | None
    ) -> WeightStatus:
        """New weights at once; an unnamed version is the number after the one that serves."""
        if version is None:
            version = next_version((await self._coordinator.weight_status()).version)
        return await self._coordinator.update_weights(WeightUpdate(source, version))

    async def begin_update(self) -> None:
        """What was kept of an interrupted update is dropped."""
        await self._part(NO_TENSORS, None, first=True)

    async def add_part(self, source: ObjectWeights | GroupWeights, version: str | None) -> None:
        """More tensors of the update under way; another version begins another update."""
        status = await self._coordinator.weight_status()
        begins = version is not None and version != status.parts_version
        await self._part(source, version, first=begins or not status.parts_version)

    async def _part(
        self, source: ObjectWeights | GroupWeights, version: str | None, *, first: bool
    ) -> None:
        status = await self._coordinator.weight_status()
        named = version or (not first and status.parts_version) or next_version(status.version)
        await self._coordinator.update_weights(WeightUpdate(source, named, first=first, last=False))

    async def finish_update(self, version: str | None) -> WeightStatus | None:
        """Load the parts that have come; None: there were none."""
        status = await self._coordinator.weight_status()
        if not status.parts_version:
            return None
        update = WeightUpdate(NO_TENSORS, version or status.parts_version, first=False)
        return await self._coordinator.update_weights(update)


def next_version(current: str) -> str:
    """ "7" -> "8", "step-100" -> "step-100+1" -> "step-100+2"."""
    counted = re.fullmatch(r"(.*\+|)([0-9]{1,18})", current, re.DOTALL)
    return f"{counted[1]}{int(counted[2]) + 1}" if counted else f"{current}+1"
