"""Late binding with foresight: which queued sample starts where, and who moves to even the load.

A sample is bound when a worker has a free slot and KV for what the sample has plus a reserve
(``placement.reserve``); in which order, ``placement.waiting_line`` says: a long sample that starts
last is what everybody waits for. When the queue is empty, running samples move where that pays
(``placement.rebalance``).

Invariants:
    - Nobody is passed by more than ``window_samples`` of the same priority that arrived later, and
      the first that finds no room keeps a worker for itself (``placement.rooms``): nobody starves
      whom no higher priority passes for ever.
    - Where nothing runs, a sample starts that fits by what it has, whatever the reserve.

Changes with every call: the reserve, which prompts have begun, and when the load was last evened
out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from placement.errors import PlanError
from placement.horizon import GroupCosts
from placement.ids import WorkerId
from placement.rebalance import RebalanceSettings, plan_moves
from placement.reserve import Reserve, ReserveTuner
from placement.rooms import Room, place
from placement.survivors import Claim
from placement.views import Binding, DispatchPlan, GroupView, Move, SampleView
from placement.waiting_line import WaitingLine

_CHUNK = 128  # of the queue, whose needs are computed at once
_PATIENCE = 256  # samples that may find no room before the rest is not looked at


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Attributes:
    rebalance: None: running samples stay where they are, until a release moves them.
    window_samples: samples are sorted by length only within so many arrivals.
    """

    rebalance: RebalanceSettings | None = field(default_factory=RebalanceSettings)
    window_samples: int = 65_536

    def __post_init__(self) -> None:
        if self.window_samples < 1:
            raise PlanError(
                f"is {self.window_samples}; it must be at least 1", field="window_samples"
            )


class Dispatcher:
    """A dispatch rule, as ``placement.dispatch.plan_dispatch`` is one.

    Attributes:
        costs: may be replaced as more of them is measured.

    Args:
        tuner: finds the reserve; shared with the release planner of the same group, so that
            what the one sends away finds room with the other.
    """

    def __init__(
        self, settings: DispatchSettings, costs: GroupCosts, tuner: ReserveTuner | None = None
    ) -> None:
        self._settings = settings
        self.costs = costs
        self._tuner = tuner or ReserveTuner(Reserve())
        self._balanced_at = 0
        self._line = WaitingLine(settings.window_samples)
        self._steps = 0

    def __call__(self, view: GroupView) -> DispatchPlan:
        if view.steps < self._steps or not (view.steps or view.running):  # another load
            self._balanced_at = 0
            self._line.forget()
        self._steps = view.steps
        reserve = self._tuner.update(view)
        if not view.queued:
            return DispatchPlan((), self._even_out(view))
        if not view.workers:
            return DispatchPlan(())
        rooms = _rooms(view, reserve)
        if all(room.full for room in rooms):
            return DispatchPlan(())
        placed = place(self._claims(view, reserve), rooms, 1, patience=_PATIENCE)
        bindings = [Binding(claim.sample.sample_id, room.worker_id) for claim, room in placed]
        self._line.begin(claim.sample for claim, _ in placed)
        if not placed and not view.running:
            bindings = _first_that_fits(self._claims(view, reserve), view)
        return DispatchPlan(tuple(bindings))

    def _claims(self, view: GroupView, reserve: Reserve) -> Iterator[Claim]:
        """Queued samples with their needs, in the order in which they are to be bound; made as
        they are asked for, because of a long queue only the head finds room."""
        line = self._line.in_order(view.queued)
        while head := list(islice(line, _CHUNK)):
            needs = reserve.needs(head, view.kv_block_tokens).tolist()
            yield from map(Claim, head, needs)

    def _even_out(self, view: GroupView) -> tuple[Move, ...]:
        rebalance = self._settings.rebalance
        if rebalance is None:
            return ()
        if view.steps - self._balanced_at < rebalance.interval_steps:
            return ()
        self._balanced_at = view.steps
        return plan_moves(view, self.costs, rebalance)


def _rooms(view: GroupView, reserve: Reserve) -> list[Room]:
    """The workers' rooms with their running samples in them, in rank order."""
    ranks = {worker.worker_id: rank for rank, worker in enumerate(view.workers)}
    need_W, samples_W = _held(
        view.running, ranks, reserve.needs(view.running, view.kv_block_tokens)
    )
    return [
        Room(w.worker_id, rank, w.max_samples, w.kv_capacity_tokens, samples, need)
        for rank, (w, samples, need) in enumerate(
            zip(view.workers, samples_W.tolist(), need_W.tolist(), strict=True)
        )
    ]


def _held(
    running: Sequence[SampleView], ranks: dict[WorkerId, int], need_N: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """KV and samples of each worker.

    Raises:
        PlanError: a running sample is on none of the workers.
    """
    need_W = np.zeros(len(ranks), np.int64)
    samples_W = np.zeros(len(ranks), np.int64)
    rank_N = np.empty(len(running), np.intp)
    for i, sample in enumerate(running):
        rank = ranks.get(sample.worker_id) if sample.worker_id is not None else None
        if rank is None:
            raise PlanError(
                f"sample {sample.sample_id} runs on worker {sample.worker_id}, which is not in "
                f"the group {list(ranks)}; queue it again"
            )
        rank_N[i] = rank
    np.add.at(need_W, rank_N, need_N)
    np.add.at(samples_W, rank_N, 1)
    return need_W, samples_W


def _first_that_fits(claims: Iterable[Claim], view: GroupView) -> list[Binding]:
    """Everybody is idle and every reserve too large: the first sample that fits by what it has."""
    worker = max(view.workers, key=lambda w: w.kv_capacity_tokens)
    for claim in claims:
        if claim.sample.context_tokens < worker.kv_capacity_tokens:
            return [Binding(claim.sample.sample_id, worker.worker_id)]
    return []
