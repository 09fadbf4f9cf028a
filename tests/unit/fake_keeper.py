"""A keeper of weights that knows versions and no tensors."""

import asyncio

from actors.control_api import DiskWeights, WeightsGroup, WeightUpdate
from actors.weights_keeper import CHECKPOINT_VERSION, KeptWeights, StagedWeights
from placement.errors import FlexFloorError, RequestError, UnavailableError, UnknownIdError

STAGE_S = 0.5
COPY_BYTES = 1000


class FakeKeeper:
    """Honours ``WeightsKeeper``. A chunk is the version that it belongs to.

    ``faults``: call -> the error to raise once; "die" as a call's fault ends it: the next call
    meets another one, which holds nothing. ``disk``: path -> digest of what lies there.
    """

    def __init__(self) -> None:
        self.committed = CHECKPOINT_VERSION
        self.staged = ""
        self.parts: list[str] = []
        self.faults: dict[str, FlexFloorError] = {}
        self.disk: dict[str, str] = {}
        self.groups: dict[str, WeightsGroup] = {}
        self.started = False

    def die(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _fault(self, call: str) -> None:
        self.started = True
        error = self.faults.pop(call, None)
        if isinstance(error, UnavailableError):
            disk = self.disk
            self.die()
            self.disk = disk
        if error is not None:
            raise error

    async def kept(self) -> KeptWeights:
        self._fault("kept")
        if self.committed == CHECKPOINT_VERSION:
            return KeptWeights(self.committed, (), 0)
        return KeptWeights(self.committed, (self.committed,), COPY_BYTES)

    async def existing(self) -> KeptWeights | None:
        return await self.kept() if self.started else None

    async def restore(self, path: str, version: str, digest: str) -> KeptWeights:
        self._fault("restore")
        if self.disk.get(path) != digest:
            raise RequestError("other weights lie there", field="source.path")
        self.committed = version
        return await self.kept()

    async def stage(self, update: WeightUpdate, current: str) -> StagedWeights:
        self._fault("stage")
        await asyncio.sleep(STAGE_S)
        digest = ""
        if isinstance(update.source, DiskWeights):
            digest = self.disk.setdefault(update.source.path, f"of {update.source.path}")
        if not update.last:
            self.parts.append(update.version)
            return StagedWeights(update.version, (), (), 3, {"receive": STAGE_S})
        self.staged = update.version
        previous = (current,) if self.committed == current else None
        return StagedWeights(update.version, (update.version,), previous, 7, {}, digest)

    async def commit(self, version: str) -> KeptWeights:
        self._fault("commit")
        assert self.staged == version
        self.committed, self.staged = version, ""
        return await self.kept()

    async def drop(self) -> None:
        self._fault("drop")
        self.staged = ""

    async def join_group(self, group: WeightsGroup) -> None:
        self.groups[group.name] = group

    async def leave_group(self, name: str) -> None:
        if self.groups.pop(name, None) is None:
            raise UnknownIdError(f"there is no group {name!r}", field="name")
