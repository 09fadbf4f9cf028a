"""Which weights the group decodes with, and how a group that is founded later gets them.

Founders are built from the model's directory; if something else was committed since then, they
load it from the keeper before they start. Joiners get everything from their peers.
"""

import logging

from actors.concurrently import all_of
from actors.crew import Crew
from actors.ports import GroupRecord
from actors.roster import Worker
from actors.weights_keeper import CHECKPOINT_VERSION, KeptWeights, ServedVersion, WeightsKeeper
from placement.errors import RequestError, UnavailableError

_log = logging.getLogger(__name__)


class ServedWeights:
    """The version lies with the roster, which is recorded at each change of it."""

    def __init__(self, crew: Crew, keeper: WeightsKeeper) -> None:
        self._crew = crew
        self._keeper = keeper

    @property
    def served(self) -> ServedVersion:
        return self._crew.roster.weights

    async def take_over(self, record: GroupRecord | None) -> None:
        """What an earlier coordinator served. What it was about to commit is served if the keeper
        says so; what nobody recorded, because the store has gone, the keeper knows alone.

        Raises: UnavailableError: the keeper does not answer.
        """
        if record is not None:
            self._crew.roster.weights = record.weights
        if record is not None and record.next_weights is None:
            return
        kept = await self._keeper.existing()
        if kept is None or kept.version == self.served.version:
            return
        if record is None:
            self._crew.roster.weights = ServedVersion(kept.version)
        elif record.next_weights is not None and kept.version == record.next_weights.version:
            self._crew.roster.weights = record.next_weights

    async def ensure_kept(self) -> None:
        """A group that is founded now can have the weights that are served.

        Raises: UnavailableError: nobody has them any more, or the keeper does not answer.
        """
        if self.served.version != CHECKPOINT_VERSION and await self.kept() is None:
            raise UnavailableError(
                f"the weights of version {self.served.version} are lost: the process that held "
                "them has ended, and they were not read as a whole from a directory that still "
                "has them. The checkpoint's own are older and are not served in their place; "
                "send all tensors of a new version"
            )

    async def load_onto(self, founders: list[Worker]) -> None:
        """Returns when all of them have the weights that are served.

        Raises:
            UnavailableError: as ``ensure_kept``.
            WeightUpdateError, WorkerLostError: a founder could not load them.
        """
        await self.ensure_kept()
        if self.served.version != CHECKPOINT_VERSION:
            kept = await self._keeper.kept()
            await all_of(w.live.load_weights(kept.version, kept.chunks) for w in founders)

    async def copy_bytes(self) -> int:
        """Of the full copy of what is served; 0: there is none now."""
        try:
            kept = await self._keeper.existing()
        except UnavailableError as error:
            _log.warning("%s", error)
            return 0
        return kept.num_bytes if kept is not None and kept.version == self.served.version else 0

    async def kept(self) -> KeptWeights | None:
        """The full copy of what is served, read again from its directory where it was lost; None:
        it cannot be.

        Raises: UnavailableError: the keeper does not answer.
        """
        kept = await self._keeper.kept()
        served = self.served
        if kept.version == served.version:
            return kept
        if served.path:
            try:
                return await self._keeper.restore(served.path, served.version, served.digest)
            except RequestError as error:
                _log.warning("version %s is not read again: %s", served.version, error)
        return None
