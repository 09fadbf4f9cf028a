"""What a training loop asks of the group between and during rollouts: weights, pause, sleep.

Records only; all of them pickle. ``actors.rollout_api`` has the requests for samples.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """``path``: a directory of safetensors files, or one file, that the coordinator's node can
    read."""

    path: str


@dataclass(frozen=True, slots=True)
class ObjectWeights:
    """Attributes:
    objects: each a dict of name -> CPU tensor (for a sparse delta: name -> ``SparseTensor``), or
        the bytes of a safetensors file; or a Ray object reference to one of these.
    """

    objects: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """Tensors that rank 0 of a torch.distributed group broadcasts, one after the other; for a
    sparse delta those that ``actors.sparse_delta`` writes to a file.

    Attributes:
        group: as it was named in ``WeightsGroup``.
        dtypes: torch's names ("bfloat16").
    """

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SparseTensor:
    """Changed elements of one tensor.

    Attributes:
        indices: int64 positions in the flattened tensor, ascending, without repetition.
        values: one per index, in the tensor's own dtype.
    """

    indices: Any
    values: Any


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights under the checkpoint's own names.

    Attributes:
        version: the caller's name for them; not that of another one in use.
        base_version: of a sparse delta, the version that it changes; None: whole tensors.
            Tensors that are not named keep their values in either case.
        checksum: of the delta (``actors.sparse_delta`` says how), checked before it is applied;
            "" where there is none.
        first, last: an update that comes in parts has both only in the parts that they name. Parts
            are received, checked and kept beside the weights that serve. The first one drops
            what was kept of an earlier update; the last one loads them all, and its ``version``
            counts. Either may have no tensors, and a ``GroupWeights`` then no group.
    """

    source: DiskWeights | ObjectWeights | GroupWeights
    version: str
    base_version: str | None = None
    checksum: str = ""
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """A torch.distributed group in which the trainer is rank 0 and the service one more rank.

    Attributes:
        name: by which updates refer to it.
        rank_offset: our rank in it.
        backend: torch's name; "gloo", or "nccl" between GPUs.
    """

    name: str
    host: str
    port: int
    rank_offset: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class WeightStatus:
    """Attributes:
    version: what new tokens are decoded with.
    failed_version, error: the last update that did not succeed since then, and why.
    seconds, received_bytes: of the last update that succeeded.
    copy_bytes: of the full copy that is kept outside the workers.
    parts_version: as the newest part named it, while the last one has not come.
    """

    version: str
    failed_version: str = ""
    error: str = ""
    seconds: float = 0.0
    received_bytes: int = 0
    copy_bytes: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
    parts_version: str = ""


class PauseMode(StrEnum):
    """What becomes of unfinished samples: they stand still, end as aborted, or are finished
    first. Samples that are accepted while paused wait."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


class ServingState(StrEnum):
    SERVING = "serving"
    PAUSING = "pausing"
    PAUSED = "paused"
    ASLEEP = "asleep"  # every lease was given back; samples that are accepted wait
    WAKING = "waking"


STANDS_STILL = (ServingState.PAUSED, ServingState.ASLEEP, ServingState.WAKING)
"""No step can be expected then."""


@dataclass(frozen=True, slots=True)
class PauseStatus:
    """Attributes:
    mode: of the pause, or that with which the group fell asleep; None while it serves.
    waiting_for: while it is on its way to another state.
    error: why the group could not be woken, until the next try; it is asleep then.
    """

    state: ServingState
    mode: PauseMode | None = None
    waiting_for: str = ""
    error: str = ""

    @property
    def on_its_way(self) -> bool:
        return self.state in (ServingState.PAUSING, ServingState.WAKING)


class PausePort(Protocol):
    """Pause and sleep as the coordinator's callers ask for them.

    Every call can be repeated. One that waits returns after ``wait_s`` at the latest, with the
    state as it is then; ``pause_status`` waits on. Raises: UnavailableError while the service
    starts or ends.
    """

    async def pause(self, mode: PauseMode, wait_s: float = 0.0) -> PauseStatus:
        """Stand still: no sample begins, the group does not change (a change in flight ends
        first), and ``mode`` says what becomes of unfinished samples. A group that is lost
        meanwhile is founded again and stands still, too. One mode may follow another. While
        asleep only ``ABORT`` means something."""
        ...

    async def resume(self) -> PauseStatus:
        """Raises: RequestError: the group is asleep."""
        ...

    async def pause_status(self, wait_s: float = 0.0) -> PauseStatus:
        """Waits as long as it is on its way."""
        ...

    async def sleep(self, mode: PauseMode = PauseMode.ABORT, wait_s: float = 0.0) -> PauseStatus:
        """Pause, then end every worker and give every lease back. What was kept is computed anew
        after ``wake``."""
        ...

    async def wake(self, wait_s: float = 0.0, *, stay_paused: bool = False) -> PauseStatus:
        """Lease and found the group again and serve (or stand still: new weights may come
        first). If that fails it is asleep as before, and ``error`` says why. A group that is
        awake is resumed, unless it is to stay paused."""
        ...

    async def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Whether no sample will read KV that was computed before now. No KV outlives its sample,
        so only running ones have any; ``running`` makes them compute theirs anew."""
        ...
