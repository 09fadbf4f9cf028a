"""What the coordinator needs of the keeper of the weights: the process outside the workers that
holds the committed version in full.

Records and a protocol; ``actors.published_weights`` has the keeper's memory, ``actors.ray_weights``
the process around it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from actors.control_api import WeightsGroup, WeightUpdate

CHECKPOINT_VERSION = "0"
"""Of the weights in the model's own directory: nothing is held for it."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """Which weights the group has, and where they can be read again.

    Attributes:
        path: the directory from which all of it was read at once; "" if it came otherwise.
        digest: by which what lies there is known again.
    """

    version: str = CHECKPOINT_VERSION
    path: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """New weights, ready to be loaded and not committed.

    Attributes:
        chunks: handles of what ``WorkerPort.load_weights`` takes: all that differs.
        previous: the same places with the weights before; None: nobody has them any more.
        source_digest: of a whole version that lies on disk, by which it is known again; "".
    """

    version: str
    chunks: tuple[Any, ...]
    previous: tuple[Any, ...] | None
    received_bytes: int
    phases_s: dict[str, float]
    source_digest: str = ""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The committed version. ``chunks``: all of it; none for the checkpoint's own."""

    version: str
    chunks: tuple[Any, ...]
    num_bytes: int


class WeightsKeeper(Protocol):
    """Every call may raise ``UnavailableError``: the keeper has gone or does not answer. The next
    call starts another one, which holds nothing."""

    async def kept(self) -> KeptWeights: ...

    async def existing(self) -> KeptWeights | None:
        """What a keeper that lives has committed; none is started."""
        ...

    async def restore(self, path: str, version: str, digest: str) -> KeptWeights:
        """Read a committed version again from where it came.

        Raises:
            RequestError: it does not lie there any more.
        """
        ...

    async def stage(self, update: WeightUpdate, current: str) -> StagedWeights:
        """Read or receive new weights; what was staged before is dropped.

        Args:
            current: the version that is served.

        Raises:
            RequestError: they are wrong; nothing is staged.
        """
        ...

    async def commit(self, version: str) -> KeptWeights:
        """What was staged as ``version`` is the committed version from now on."""
        ...

    async def drop(self) -> None:
        """Forget what was staged."""
        ...

    async def join_group(self, group: WeightsGroup) -> None:
        """Raises: RequestError."""
        ...

    async def leave_group(self, name: str) -> None:
        """Raises: UnknownIdError."""
        ...
