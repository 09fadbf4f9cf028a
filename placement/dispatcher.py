"""Late binding with foresight: which queued sample starts where, and who moves to even the load.

A sample is bound when a worker has a free slot and KV for what the sample has plus a reserve
(``placement.reserve``). The highest priority goes first; within it those that were running
before, then a scout of each prompt, from which the predictor learns about the others, then those
that are expected to become longest: a long sample that starts last is what everybody waits for.
Where nothing is believed, or the same of all, the order is that of arrival. When the queue is
empty, running samples move where that pays (``placement.rebalance``).

Invariants:
    - Nobody is passed by more than ``window_samples`` of the same priority that arrived later, and
      the first that finds no room keeps a worker for itself (``placement.rooms``): nobody starves
      whom no higher priority passes for ever.
    - Where nothing runs, a sample starts that fits by what it has, whatever the reserve.

Changes with every call: the reserve, which prompts have begun, and when the load was last evened
out.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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

_CHUNK = 128  # of the queue, whose needs are computed at once
_PATIENCE = 256  # samples that may find no room before the rest is not looked at
_CERTAIN_SIGMA = 0.05  # of a belief to which the prompt's other samples could add nothing


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
        self._begun: set[str] = set()
        self._steps = 0

    def __call__(self, view: GroupView) -> DispatchPlan:
        if view.steps < self._steps or not (view.steps or view.running):  # another load
            self._balanced_at = 0
            self._begun.clear()
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
        self._begun.update(claim.sample.prompt_key for claim, _ in placed)
        if not placed and not view.running:
            bindings = _first_that_fits(self._claims(view, reserve), view)
        return DispatchPlan(tuple(bindings))

    def _claims(self, view: GroupView, reserve: Reserve) -> Iterator[Claim]:
        """Queued samples with their needs, in the order in which they are to be bound; made as
        they are asked for, because of a long queue only the head finds room."""
        scouted = set(self._begun)
        arrived = sorted(view.queued, key=lambda sample: sample.order)
        heap = [(self._urgency(sample, scouted), sample) for sample in arrived]
        heapq.heapify(heap)
        while heap:
            head = [heapq.heappop(heap)[1] for _ in range(min(_CHUNK, len(heap)))]
            needs = reserve.needs(head, view.kv_block_tokens).tolist()
            yield from map(Claim, head, needs)

    def _urgency(self, sample: SampleView, scouted: set[str]) -> tuple[int, int, bool, float, int]:
        """Least first.

        Args:
            scouted: prompts of which a sample goes ahead; grows by this one's.
        """
        if sample.generated_tokens:
            return (-sample.priority, -1, False, -sample.context_tokens, sample.order)
        window, belief = sample.order // self._settings.window_samples, sample.belief
        if belief is None:
            return (-sample.priority, window, False, 0.0, sample.order)
        follows = sample.prompt_key in scouted or belief.sigma < _CERTAIN_SIGMA
        scouted.add(sample.prompt_key)
        # A log-normal's mean is monotone in mu + sigma^2 / 2.
        longest = -belief.mu - 0.5 * belief.sigma * belief.sigma
        return (-sample.priority, window, follows, longest, sample.order)

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
