"""Who stays when the group becomes narrower, and whether everybody's samples then have room.

Those stay who hold most context, so that least has to move; but nobody can stay whose own samples
outgrow the KV that is left beside more experts. The leavers' samples are placed by the same
placing, in the same order, that binds them afterwards (``placement.rooms``, largest first as in
``placement.dispatcher``).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.ids import WorkerId
from placement.rooms import Room, place
from placement.views import GroupView, SampleView


@dataclass(frozen=True, slots=True)
class Survivors:
    """Attributes:
    moved: samples of the leavers.
    """

    staying: tuple[WorkerId, ...]
    leavers: tuple[WorkerId, ...]
    moved: tuple[SampleView, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A sample with the KV that it is counted with, in the terms of ``placement.rooms``."""

    sample: SampleView
    max_context_tokens: int


def choose_survivors(
    view: GroupView, width: int, need_tokens_N: NDArray[np.int64]
) -> Survivors | None:
    """None where somebody would find no room.

    Args:
        need_tokens_N: KV with which each of ``view.running`` is counted, in whole blocks.
    """
    capacity_tokens = view.kv_tokens_at_width[width]
    rank_of = {worker.worker_id: rank for rank, worker in enumerate(view.workers)}
    count, num_workers = len(view.running), len(view.workers)
    rank_N = np.fromiter((rank_of[_worker(s)] for s in view.running), np.intp, count)
    context_N = np.fromiter((s.context_tokens for s in view.running), np.float64, count)
    context_W = np.bincount(rank_N, context_N, num_workers)
    need_W = np.bincount(rank_N, need_tokens_N, num_workers)
    samples_W = np.bincount(rank_N, minlength=num_workers)
    max_samples_W = np.array([worker.max_samples for worker in view.workers])
    able = np.flatnonzero((need_W <= capacity_tokens) & (samples_W <= max_samples_W))
    if len(able) < width:
        return None
    stays_W = np.zeros(num_workers, np.bool_)
    stays_W[able[np.argsort(-context_W[able], kind="stable")][:width]] = True

    rooms = [
        Room(
            view.workers[rank].worker_id,
            rank,
            view.workers[rank].max_samples,
            capacity_tokens,
            int(samples_W[rank]),
            int(need_W[rank]),
        )
        for rank in np.flatnonzero(stays_W).tolist()
    ]
    moving = np.flatnonzero(~stays_W[rank_N])
    order_N = np.fromiter((view.running[i].order for i in moving.tolist()), np.int64, len(moving))
    largest_first = moving[np.lexsort((order_N, -need_tokens_N[moving]))].tolist()
    claims = [Claim(view.running[i], int(need_tokens_N[i])) for i in largest_first]
    # Needs are whole blocks already, so blocks of one token change nothing.
    if len(place(claims, rooms, 1)) < len(claims):
        return None
    ids = [worker.worker_id for worker in view.workers]
    return Survivors(
        tuple(w for rank, w in enumerate(ids) if stays_W[rank]),
        tuple(w for rank, w in enumerate(ids) if not stays_W[rank]),
        tuple(claim.sample for claim in claims),
    )


def _worker(sample: SampleView) -> WorkerId:
    assert sample.worker_id is not None, "a running sample has a worker"
    return sample.worker_id
