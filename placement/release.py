"""How many workers there should be, and who leaves: the first rule.

It knows no lengths and no prices. It grows for a queue, and once samples have begun to finish
it goes to the narrowest group that holds every running sample at its full length.

Whether samples fit is not estimated: the change is carried out on the view, with the same
placing that will dispatch the samples afterwards. So what was promised here is what happens.

Invariants:
    - Nobody leaves while samples are queued, nor before one of the load has ended.
    - The width never falls below the floor, except to nothing when all is drained.
    - A decision that is carried out is followed by KEEP, as long as no sample comes or ends: a
      width is only chosen if nothing narrower would be possible from there. Where samples are
      packed so tightly that no such width exists, the group waits for the next one to end. (One
      exception: a group in which nothing can proceed grows to the first width that will do.)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from placement.dispatch import in_queue_order, plan_dispatch, rooms_of
from placement.ids import WorkerId
from placement.rooms import kv_need_tokens, place
from placement.views import (
    GroupView,
    Prediction,
    SampleView,
    WidthDecision,
    WidthReason,
    WorkerView,
)


class IdlePolicy(StrEnum):
    """How many workers stay when nothing is left to decode."""

    NONE = "none"
    FLOOR = "floor"
    ALL = "all"


class ReleaseRule(Protocol):
    """Decides the width: ``decide_width``, or ``placement.planner.ReleasePlanner``."""

    def __call__(self, view: GroupView, idle_policy: IdlePolicy) -> WidthDecision: ...


def decide_width(view: GroupView, idle_policy: IdlePolicy = IdlePolicy.ALL) -> WidthDecision:
    """The width that the group should have now.

    A decision asks for a change exactly when its width differs from the number of workers.
    """
    if view.nobody_leaves:
        return _decide_static(view)
    if view.queued:
        return _decide_growth(view)
    if not view.running:
        return _decide_drained(view, idle_policy)
    if not view.any_finished:
        return keep(view, f"none of {len(view.running)} running samples has ended yet")
    return _decide_release(view)


def _decide_static(view: GroupView) -> WidthDecision:
    now = len(view.workers)
    width = max(now, view.max_workers)
    return WidthDecision(
        width, (), WidthReason.STATIC, f"a static rollout is open: {now} -> {width} workers"
    )


def _decide_drained(view: GroupView, idle_policy: IdlePolicy) -> WidthDecision:
    now = len(view.workers)
    width = {
        IdlePolicy.NONE: 0,
        IdlePolicy.FLOOR: view.floor_workers,
        IdlePolicy.ALL: view.max_workers,
    }[idle_policy]
    explanation = f"nothing to decode; idle policy {idle_policy} wants {width} workers, {now} now"
    if width == now:
        return keep(view, explanation)
    leavers = tuple(w.worker_id for w in view.workers[width:])
    return WidthDecision(width, leavers, WidthReason.DRAINED, explanation)


def _decide_growth(view: GroupView) -> WidthDecision:
    now, num_queued = len(view.workers), len(view.queued)
    num_waiting = num_queued - len(plan_dispatch(view).bindings)
    if not num_waiting:
        return keep(view, f"{num_queued} queued samples find room on {now} workers")
    waiting = f"{num_waiting} of {num_queued} queued samples find no room on {now} workers"
    if now >= view.max_workers:
        return keep(view, f"{waiting}, and no more than {view.max_workers} may be leased")
    if not view.workers:
        return WidthDecision(view.max_workers, (), WidthReason.QUEUE, waiting)

    first_enough = None
    narrowest = max(now + 1, view.floor_workers, _least_width(view))
    for width in range(narrowest, view.max_workers + 1):
        after = _grown(view, width)
        if after is None:
            continue
        first_enough = first_enough or width
        if _is_settled(after):
            return WidthDecision(
                width, (), WidthReason.QUEUE, f"{waiting}; {_capacity(view, width)} hold them all"
            )
    if first_enough is not None and (view.running or num_waiting < num_queued):
        # Room would come, and then some of it would be released again: two changes for little.
        return keep(view, f"{waiting}, but {first_enough} workers would not all stay in use")
    width = first_enough or view.max_workers
    return WidthDecision(
        width, (), WidthReason.QUEUE, f"{waiting}; the most that helps is {_capacity(view, width)}"
    )


def _decide_release(view: GroupView) -> WidthDecision:
    now = len(view.workers)
    load = (
        f"{len(view.running)} running samples that need up to "
        f"{_need_tokens(view.running, view)} KV tokens"
    )
    first_enough = None
    for width in range(max(view.floor_workers, _least_width(view)), now):
        after = _shrunk(view, width)
        if after is None:
            continue
        first_enough = first_enough or width
        if _is_settled(after):
            staying = {w.worker_id for w in after.workers}
            leavers = tuple(w.worker_id for w in view.workers if w.worker_id not in staying)
            num_moved = sum(s.worker_id in leavers for s in view.running)
            return WidthDecision(
                width,
                leavers,
                WidthReason.CONSOLIDATE if num_moved else WidthReason.IDLE,
                f"{load} fit on {_capacity(view, width)}; {num_moved} of them move, {now} workers "
                f"now, floor {view.floor_workers}",
            )
    if first_enough is not None:
        return keep(
            view, f"{load}: {first_enough} workers would hold them, and soon after that fewer"
        )
    return keep(view, f"{load} do not fit on fewer than {now} workers, floor {view.floor_workers}")


def keep(view: GroupView, explanation: str, predicted: Prediction | None = None) -> WidthDecision:
    return WidthDecision(len(view.workers), (), WidthReason.KEEP, explanation, predicted)


def _is_settled(view: GroupView) -> bool:
    """Nobody could leave from here."""
    if view.queued or not view.any_finished:
        return True
    widths = range(max(view.floor_workers, _least_width(view)), len(view.workers))
    return all(_shrunk(view, width) is None for width in widths)


def _shrunk(view: GroupView, width: int) -> GroupView | None:
    """The group after a release to ``width``, or None where a sample would find no room.

    Those stay who have most running context, so that least of it has to move; but nobody can
    stay whose own samples outgrow the KV that is left beside more experts.
    """
    capacity_tokens = view.kv_tokens_at_width[width]
    workers = [replace(w, kv_capacity_tokens=capacity_tokens) for w in view.workers]
    rooms = rooms_of(workers, view.running, view.kv_block_tokens)
    able = [room for room in rooms if not room.overfull]
    if len(able) < width:
        return None
    context_tokens: Counter[WorkerId | None] = Counter()
    for sample in view.running:
        context_tokens[sample.worker_id] += sample.context_tokens
    able.sort(key=lambda room: -context_tokens[room.worker_id])  # stable: rank order among equals
    staying = {room.worker_id for room in able[:width]}
    return _bound(
        view,
        [w for w in workers if w.worker_id in staying],
        [s for s in view.running if s.worker_id in staying],
        [s for s in view.running if s.worker_id not in staying],
    )


def _grown(view: GroupView, width: int) -> GroupView | None:
    """The group after growth to ``width``, or None where a queued sample would find no room."""
    capacity_tokens = view.kv_tokens_at_width[width]
    next_id = max(w.worker_id for w in view.workers) + 1
    joiners = [
        WorkerView(WorkerId(next_id + i), _max_samples(view), capacity_tokens)
        for i in range(width - len(view.workers))
    ]
    workers = [replace(w, kv_capacity_tokens=capacity_tokens) for w in view.workers]
    return _bound(view, workers + joiners, view.running, view.queued)


def _bound(
    view: GroupView,
    workers: Sequence[WorkerView],
    running: Sequence[SampleView],
    queued: Sequence[SampleView],
) -> GroupView | None:
    """``view`` with these workers, after the dispatcher has bound ``queued``; None if some wait."""
    rooms = rooms_of(workers, running, view.kv_block_tokens)
    placed = place(in_queue_order(queued), rooms, view.kv_block_tokens)
    if len(placed) < len(queued):
        return None
    moved = [replace(sample, worker_id=room.worker_id) for sample, room in placed]
    return replace(view, workers=tuple(workers), running=(*running, *moved), queued=())


def _least_width(view: GroupView) -> int:
    """No narrower group can hold all samples, by sample slots and by the sum of their KV.

    Spares the search most widths. With no such width, one more than the widest.
    """
    samples = (*view.running, *view.queued)
    need_tokens, max_samples = _need_tokens(samples, view), _max_samples(view)
    for width in range(1, len(view.kv_tokens_at_width)):
        enough_kv = width * view.kv_tokens_at_width[width] >= need_tokens
        if enough_kv and width * max_samples >= len(samples):
            return width
    return len(view.kv_tokens_at_width)


def _need_tokens(samples: Sequence[SampleView], view: GroupView) -> int:
    return sum(kv_need_tokens(s.max_context_tokens, view.kv_block_tokens) for s in samples)


def _max_samples(view: GroupView) -> int:
    return min(w.max_samples for w in view.workers)


def _capacity(view: GroupView, width: int) -> str:
    return (
        f"{width} workers with {view.kv_tokens_at_width[width]} KV tokens and "
        f"{_max_samples(view)} samples each"
    )
