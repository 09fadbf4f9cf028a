"""Updates of the weights, one at a time, from the request to decoding with them.

New weights are received and staged by the keeper beside the decoding; then the group stands still
and exchanges its weights (``actors.weight_exchange``).
"""

import asyncio
import logging
from dataclasses import replace

from actors.concurrently import end
from actors.control_api import DiskWeights, GroupWeights, WeightsGroup, WeightStatus, WeightUpdate
from actors.crew import Crew
from actors.served_weights import ServedWeights
from actors.standstill import Standstill
from actors.weight_exchange import WeightExchange
from actors.weights_keeper import (
    CHECKPOINT_VERSION,
    ServedVersion,
    StagedWeights,
    WeightsKeeper,
)
from placement.errors import FlexFloorError, RequestError, UnavailableError

_log = logging.getLogger(__name__)

_MAX_VERSION_CHARS = 256


class WeightUpdates:
    """Attributes:
    standing_still_for: why nobody decodes, while weights are loaded.
    served_since: no step can be expected from before this.
    """

    def __init__(
        self,
        crew: Crew,
        served: ServedWeights,
        keeper: WeightsKeeper,
        exchange: WeightExchange,
        standstill: Standstill,
    ) -> None:
        self._crew = crew
        self._served = served
        self._keeper = keeper
        self._exchange = exchange
        self._standstill = standstill
        self._status = WeightStatus(CHECKPOINT_VERSION)
        self._updating: asyncio.Task[None] | None = None
        self.standing_still_for = ""
        self.served_since = 0.0

    @property
    def version(self) -> str:
        return self._served.served.version

    async def status(self) -> WeightStatus:
        return replace(
            self._status, version=self.version, copy_bytes=await self._served.copy_bytes()
        )

    async def update(self, update: WeightUpdate) -> WeightStatus:
        """Raises: as ``CoordinatorPort.update_weights``."""
        if self._updating is not None and not self._updating.done():
            raise UnavailableError(
                f"another update of the weights is under way, and version {update.version} has to "
                "wait for its end; try again then"
            )
        self._updating = asyncio.ensure_future(self._update(update))
        await asyncio.shield(self._updating)  # a caller that goes away leaves nothing half-done
        return await self.status()

    async def stop(self) -> None:
        await end(self._updating)

    async def join_group(self, group: WeightsGroup) -> None:
        """Raises: RequestError, UnavailableError."""
        await self._keeper.join_group(group)

    async def leave_group(self, name: str) -> None:
        """Raises: UnknownIdError."""
        await self._keeper.leave_group(name)

    async def _update(self, update: WeightUpdate) -> None:
        source, telemetry = _source_label(update), self._crew.telemetry
        started_at = self._crew.clock()
        try:
            self._check(update)
            if self.version != CHECKPOINT_VERSION:
                await self._served.kept()  # what is not named keeps its values
            staged = await self._keeper.stage(update, self.version)
            waited_s = await self._come_in(update, staged) if update.last else 0.0
        except FlexFloorError as error:
            _log.warning("version %s of the weights did not come: %s", update.version, error)
            telemetry.weight_updates.labels(source, "failed").inc()
            parts = "" if update.last else self._status.parts_version
            self._status = replace(
                self._status, failed_version=update.version, error=str(error), parts_version=parts
            )
            raise
        telemetry.weight_bytes.labels(source).inc(staged.received_bytes)
        if not update.last:
            self._status = replace(self._status, parts_version=update.version)
            return
        seconds = self._crew.clock() - started_at
        telemetry.weight_updates.labels(source, "served").inc()
        telemetry.weight_update_s.labels(source).observe(seconds)
        self._status = WeightStatus(
            self.version,
            seconds=seconds,
            received_bytes=staged.received_bytes,
            phases_s={**staged.phases_s, "wait": waited_s, **self._exchange.phases_s},
        )

    def _check(self, update: WeightUpdate) -> None:
        """Raises: RequestError."""
        version = update.version
        if not 0 < len(version) <= _MAX_VERSION_CHARS:
            raise RequestError(
                f"has {len(version)} characters; use 1 to {_MAX_VERSION_CHARS}", field="version"
            )
        if update.last and version in (self.version, CHECKPOINT_VERSION):
            raise RequestError(
                f"{version!r} is in use: {self.version!r} is served, {CHECKPOINT_VERSION!r} always "
                "means the checkpoint's own weights; choose another name",
                field="version",
            )
        if update.base_version is not None and update.base_version != self.version:
            raise RequestError(
                f"is {update.base_version!r}, and {self.version!r} is served: a delta of one does "
                "not fit the other; make it of what is served, or send whole tensors",
                field="base_version",
            )

    async def _come_in(self, update: WeightUpdate, staged: StagedWeights) -> float:
        """Returns how long it waited for the group to come to rest.

        Raises: WeightUpdateError, UnavailableError.
        """
        ready_at = self._crew.clock()
        path = update.source.path if isinstance(update.source, DiskWeights) else ""
        digest = staged.source_digest
        new = ServedVersion(update.version, path if digest else "", digest)
        group = self._crew.settings.group
        change_s = group.build_timeout_s + group.prepare_timeout_s + 2 * group.switch_timeout_s

        async def exchange() -> float:
            waited_s = self._crew.clock() - ready_at
            self.standing_still_for = f"version {new.version} of the weights is loaded"
            try:
                await self._exchange.replace(new, staged)
            finally:
                self.standing_still_for = ""
                self.served_since = self._crew.clock()
            return waited_s

        try:
            return await self._standstill.do(exchange, change_s)
        except FlexFloorError:
            await self._drop()
            raise

    async def _drop(self) -> None:
        try:
            await self._keeper.drop()
        except UnavailableError as error:
            _log.warning("%s", error)  # what was staged has gone with it


def _source_label(update: WeightUpdate) -> str:
    if isinstance(update.source, DiskWeights):
        return "disk"
    return "group" if isinstance(update.source, GroupWeights) else "object"
