"""From the demo's records to timelines: who was on which slot, when. Pure.

Snapshots say what a worker was doing, operations when it reconfigured, releases and the other
job's records what happened to the slot when no worker was on it.
"""

from collections import defaultdict

from actors.rollout_api import OperationStatus
from deploy.demo.records import BorrowedSlot, DemoRecords, Replay
from deploy.demo.report import CAVEAT, figures_of
from deploy.report.timeline import (
    Activity,
    GroupChange,
    Origin,
    RolloutTimeline,
    Span,
    Timelines,
    in_drawing_order,
)
from placement.ids import WorkerId


def timelines_of(records: DemoRecords) -> Timelines:
    """Static above elastic."""
    return Timelines(
        Origin.MEASURED,
        CAVEAT,
        (
            _timeline("static", records.static, ()),
            _timeline("elastic", records.elastic, records.borrowed),
        ),
    )


def _timeline(name: str, replay: Replay, borrowed: tuple[BorrowedSlot, ...]) -> RolloutTimeline:
    return RolloutTimeline(
        name=name,
        figures=figures_of(replay),
        slots=slot_lanes(replay, borrowed),
        active_samples=active_samples(replay),
        changes=tuple(_change(op, replay) for op in replay.operations),
    )


def _change(op: OperationStatus, replay: Replay) -> GroupChange:
    return GroupChange(
        at_s=op.started_at - replay.started_at,
        ended_s=(op.ended_at or replay.ended_at) - replay.started_at,
        workers_from=len(op.old_members),
        workers_to=len(op.new_members),
        reason=op.reason,
        explanation=op.explanation,
        moved_samples=len(op.moved_samples),
        predicted_steps=op.predicted.steps_with if op.predicted else None,
        measured_steps=op.measured_steps,
    )


def slot_lanes(replay: Replay, borrowed: tuple[BorrowedSlot, ...]) -> dict[str, tuple[Span, ...]]:
    """Per slot its spans within the rollout, in drawing order; slots by name."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    slot_of_worker = {
        worker.worker_id: worker.slot or f"worker {worker.worker_id}"
        for snapshot in replay.snapshots
        for worker in snapshot.workers
    }
    for slot, spans in _observed(replay, slot_of_worker).items():
        lanes[slot] += spans
    for op in replay.operations:
        for released in op.released:
            lanes[slot_of_worker.get(released.worker_id, released.slot)].append(
                _clipped(Activity.FREED, released.removed_at, replay.ended_at, replay)
            )
        for worker_id in {*op.old_members, *op.new_members}:
            removed = [r.removed_at for r in op.released if r.worker_id == worker_id]
            end = min([op.ended_at or replay.ended_at, *removed])
            if worker_id in slot_of_worker:
                lanes[slot_of_worker[worker_id]].append(
                    _clipped(Activity.RECONFIGURING, op.started_at, end, replay)
                )
    for slot_record in borrowed:
        lanes[slot_record.slot].append(
            _clipped(Activity.BORROWED, slot_record.started_at, slot_record.returned_at, replay)
        )
    return {slot: in_drawing_order(spans) for slot, spans in sorted(lanes.items())}


def active_samples(replay: Replay) -> tuple[tuple[float, int], ...]:
    """(seconds since acceptance, samples not yet ended), one point per arrival."""
    points = [(0.0, replay.status.num_samples)]
    for arrived in sorted(replay.samples, key=lambda arrived: arrived.at):
        points.append((arrived.at - replay.started_at, points[-1][1] - 1))
    return tuple(points)


def _observed(replay: Replay, slot_of_worker: dict[WorkerId, str]) -> dict[str, list[Span]]:
    """What the snapshots saw; each holds until the next one, or until the slot went back.
    Adjoining equal ones are one."""
    spans: dict[str, list[Span]] = defaultdict(list)
    removed_at = {r.worker_id: r.removed_at for op in replay.operations for r in op.released}
    ends = [s.at for s in replay.snapshots[1:]] + [replay.ended_at]
    for snapshot, end in zip(replay.snapshots, ends, strict=True):
        for worker in snapshot.workers:
            activity = Activity.DECODING if worker.running > 0 else Activity.IDLE
            left_at = min(end, removed_at.get(worker.worker_id, end))
            span = _clipped(activity, snapshot.at, left_at, replay)
            lane = spans[slot_of_worker[worker.worker_id]]
            if lane and (lane[-1].activity, lane[-1].end_s) == (span.activity, span.start_s):
                lane[-1] = Span(span.activity, lane[-1].start_s, span.end_s)
            else:
                lane.append(span)
    return spans


def _clipped(activity: Activity, start: float, end: float, replay: Replay) -> Span:
    """A span within the rollout; an empty one ends where it starts."""
    first = max(start, replay.started_at) - replay.started_at
    last = min(end, replay.ended_at) - replay.started_at
    return Span(activity, first, max(first, last))
