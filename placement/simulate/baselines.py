"""What the planner is measured against. All of them admit samples as ``admission`` does.

- chunk: contiguous chunks of the batch, so that all samples of a prompt share a worker (as verl
  dispatches a batch over data-parallel ranks); round_robin: sample i to worker i mod width. Each
  worker has its own queue.
- least_loaded: one queue, in arrival order, to the worker with most room.
- idle_release: least_loaded, and workers without samples leave.
- half_once: least_loaded, and half of the workers leave once, as soon as a fifth of the samples
  has ended, none waits and the others hold what is left (after RollPacker, which does it between
  20 and 50 %; later is allowed here because a queue may last longer than that).
"""

import heapq
from collections.abc import Callable, Iterator
from enum import StrEnum

import numpy as np

from placement.ids import WorkerId
from placement.reserve import Reserve
from placement.simulate.admission import Admission, Rooms, need_tokens, positions
from placement.simulate.policy import Moment, Orders
from placement.simulate.workload import Ints
from placement.views import WidthDecision, WidthReason

HALF_FROM_RATIO = 0.2
STEPS_BETWEEN_RELEASES = 256
_BLOCK = 16
GROWTH_MARGIN = 1.12  # KV that what is left may still grow by before more of it has ended


class Placement(StrEnum):
    CHUNK = "chunk"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


def never(_: Moment) -> WidthDecision | None:
    """The width stays."""
    return None


class Baseline:
    """Args:
    width: workers from start to end; None for all.
    release: may narrow the group.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        width: int | None = None,
        release: Callable[[Moment], WidthDecision | None] = never,
    ) -> None:
        self.name = name
        self.start_width = width
        self._placement = placement
        self._release = release
        self._admission = Admission()
        self._pinned_N: Ints | None = None

    def decide_width(self, moment: Moment) -> WidthDecision | None:
        return self._release(moment)

    def dispatch(self, moment: Moment) -> Orders:
        queued = moment.states.queued()
        self._admission.tune(moment, bool(queued.size))
        if not queued.size:
            return Orders(())
        there = self._admission.rooms(moment)
        if self._placement is Placement.LEAST_LOADED:
            return Orders(_to_least_loaded(moment, queued, there, self._admission))
        if self._pinned_N is None:
            self._pinned_N = pin(self._placement, len(moment.workload), len(moment.members))
        return Orders(_to_pinned(moment, queued, there, self._pinned_N, self._admission))


def pin(placement: Placement, num_samples: int, width: int) -> Ints:
    """The position of each sample's worker."""
    if placement is Placement.ROUND_ROBIN:
        return np.arange(num_samples) % width
    sizes = [num_samples // width + (i < num_samples % width) for i in range(width)]
    return np.repeat(np.arange(width), sizes)


def _to_least_loaded(
    moment: Moment, queued: Ints, there: Rooms, admission: Admission
) -> list[tuple[int, WorkerId]]:
    """In arrival order; where the first finds no room, all wait."""
    most_room = [
        (-float(free), position)
        for position, free in enumerate(there.free_tokens_W)
        if there.free_slots_W[position] > 0
    ]
    heapq.heapify(most_room)
    bindings: list[tuple[int, WorkerId]] = []
    for sample, need in _with_needs(moment, queued, admission):
        if not most_room or not there.fits(most_room[0][1], need):
            break
        position = most_room[0][1]
        there.admit(position, need)
        bindings.append((sample, moment.members[position]))
        if there.slots(position):
            heapq.heapreplace(most_room, (-float(there.free_tokens_W[position]), position))
        else:
            heapq.heappop(most_room)
    return bindings


def _with_needs(moment: Moment, queued: Ints, admission: Admission) -> Iterator[tuple[int, float]]:
    """Waiting samples with their needs, foreseen in blocks: mostly a few of many are admitted."""
    for start in range(0, len(queued), _BLOCK):
        some = queued[start : start + _BLOCK]
        yield from zip(some.tolist(), admission.needs(moment, some).tolist(), strict=True)


def _to_pinned(
    moment: Moment, queued: Ints, there: Rooms, pinned_N: Ints, admission: Admission
) -> list[tuple[int, WorkerId]]:
    """Each worker its own queue, in arrival order."""
    where = pinned_N[queued]
    by_worker = queued[np.argsort(where, kind="stable")]
    edges = np.searchsorted(np.sort(where, kind="stable"), np.arange(len(moment.members) + 1))
    bindings = []
    for position, worker_id in enumerate(moment.members):
        own = by_worker[edges[position] : edges[position + 1]]
        for sample, need in _with_needs(moment, own[: there.slots(position)], admission):
            if not there.fits(position, need):
                break
            there.admit(position, need)
            bindings.append((sample, worker_id))
    return bindings


class IdleRelease:
    """Workers without samples leave, where the others can take their experts."""

    def __init__(self) -> None:
        self._last_step = -STEPS_BETWEEN_RELEASES

    def __call__(self, moment: Moment) -> WidthDecision | None:
        if moment.states.queued().size or not moment.num_ended:
            return None
        if moment.steps - self._last_step < STEPS_BETWEEN_RELEASES:
            return None
        load_W = _context_of_members(moment)
        idle = np.flatnonzero(load_W == 0)
        now = len(moment.members)
        for count in range(min(len(idle), now - moment.floor_workers), 0, -1):
            capacity_tokens = moment.cluster.kv_tokens_at_width[now - count]
            if load_W.max() * GROWTH_MARGIN <= capacity_tokens:
                self._last_step = moment.steps
                leavers = tuple(moment.members[i] for i in idle[-count:])
                return WidthDecision(
                    now - count, leavers, WidthReason.IDLE, f"{count} workers have no samples"
                )
        return None


class HalfOnce:
    """Half of the workers leave, once; those stay who hold most context."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, moment: Moment) -> WidthDecision | None:
        width = len(moment.members) // 2
        if self._done or width < moment.floor_workers or moment.states.queued().size:
            return None
        if moment.num_ended < HALF_FROM_RATIO * len(moment.workload):
            return None
        load_W = _context_of_members(moment)
        running = moment.states.running()
        needed_tokens = float(need_tokens(moment, running, Reserve()).sum())
        room_tokens = moment.cluster.kv_tokens_at_width[width]
        few = len(running) <= width * moment.cluster.max_samples
        if needed_tokens * GROWTH_MARGIN > width * room_tokens or not few:
            return None
        if load_W.max() * GROWTH_MARGIN > room_tokens:
            return None
        self._done = True
        by_load = np.argsort(-load_W, kind="stable")
        leavers = tuple(moment.members[i] for i in sorted(by_load[width:].tolist()))
        return WidthDecision(
            width, leavers, WidthReason.CONSOLIDATE, f"{moment.num_ended} samples have ended"
        )


def _context_of_members(moment: Moment) -> Ints:
    running = moment.states.running()
    load_W = np.bincount(
        positions(moment, running), moment.states.context_tokens_N[running], len(moment.members)
    )
    return load_W.astype(np.int64)
