"""Which queued sample starts on which worker.

Late binding: there is one queue, and a sample is bound only when a worker has a free sample
slot and KV for the sample's full length. The baseline binds early: each sample is pinned to
the worker of its chunk.

Both fill ``placement.rooms``; neither looks at how long a response will be.
"""

from collections.abc import Iterable, Mapping, Sequence

from placement.errors import PlanError
from placement.ids import SampleId, WorkerId
from placement.rooms import Room, kv_need_tokens, place
from placement.views import Binding, DispatchPlan, GroupView, SampleView, WorkerView


def plan_dispatch(view: GroupView) -> DispatchPlan:
    """Bind queued samples, in queue order, to the least loaded workers that have room.

    A sample that comes back from a leaver has kept its old order, so it goes first among those
    of its priority.
    """
    pairs = place(
        in_queue_order(view.queued),
        rooms_of(view.workers, view.running, view.kv_block_tokens),
        view.kv_block_tokens,
    )
    return DispatchPlan(tuple(Binding(s.sample_id, room.worker_id) for s, room in pairs))


def assign_static_chunks(
    sample_ids: Sequence[SampleId], members: Sequence[WorkerId]
) -> dict[SampleId, WorkerId]:
    """The worker of each of a rollout's samples: contiguous chunks, in rank order.

    Source: verl's chunked dispatch of a batch over data-parallel ranks. Where the samples do not
    divide evenly, the first ranks get one more (verl pads or refuses instead).

    Raises:
        PlanError: there are no members.
    """
    if not members:
        raise PlanError("a static rollout needs workers before its samples can be placed")
    base, num_larger = divmod(len(sample_ids), len(members))
    workers = [w for rank, w in enumerate(members) for _ in range(base + (rank < num_larger))]
    return dict(zip(sample_ids, workers, strict=True))


def plan_static_chunks(view: GroupView, chunk_worker: Mapping[SampleId, WorkerId]) -> DispatchPlan:
    """Bind each queued sample to the worker of its chunk, in queue order, where there is room.

    Within a chunk nobody passes a sample that waits.

    Args:
        chunk_worker: from ``assign_static_chunks``; queued samples that it does not name are
            left alone.

    Raises:
        PlanError: a chunk's worker is not in the group; the samples need new chunks.
    """
    room_of = {
        room.worker_id: room for room in rooms_of(view.workers, view.running, view.kv_block_tokens)
    }
    waiting: set[WorkerId] = set()
    bindings = []
    for sample in in_queue_order(view.queued):
        worker_id = chunk_worker.get(sample.sample_id)
        if worker_id is None or worker_id in waiting:
            continue
        room = room_of.get(worker_id)
        if room is None:
            raise PlanError(
                f"sample {sample.sample_id} is pinned to worker {worker_id}, which is not in the "
                f"group {list(room_of)}; assign its rollout's chunks again"
            )
        need_tokens = kv_need_tokens(sample.max_context_tokens, view.kv_block_tokens)
        if room.fits(need_tokens):
            room.add(need_tokens)
            bindings.append(Binding(sample.sample_id, worker_id))
        else:
            waiting.add(worker_id)
    return DispatchPlan(tuple(bindings))


def in_queue_order(samples: Iterable[SampleView]) -> list[SampleView]:
    """The highest priority first; within one, in arrival order."""
    return sorted(samples, key=lambda sample: (-sample.priority, sample.order))


def rooms_of(
    workers: Sequence[WorkerView], running: Iterable[SampleView], kv_block_tokens: int
) -> list[Room]:
    """The workers' rooms with their running samples in them, in rank order.

    Raises:
        PlanError: a running sample is on none of the workers.
    """
    rooms = [
        Room(w.worker_id, rank, w.max_samples, w.kv_capacity_tokens)
        for rank, w in enumerate(workers)
    ]
    room_of = {room.worker_id: room for room in rooms}
    for sample in running:
        room = room_of.get(sample.worker_id) if sample.worker_id is not None else None
        if room is None:
            raise PlanError(
                f"sample {sample.sample_id} runs on worker {sample.worker_id}, which is not in "
                f"the group {list(room_of)}; queue it again"
            )
        room.add(kv_need_tokens(sample.max_context_tokens, kv_block_tokens))
    return rooms
