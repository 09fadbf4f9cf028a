"""Moves of running samples that even the context out over the workers.

In lockstep every step waits for the worker that reads most KV, so what counts is the largest
context, not the mean. A move pays back step by step and costs once; it is made only if it pays
within a horizon, with a margin, because the samples that make a worker heavy may soon end.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from placement.horizon import GroupCosts
from placement.ids import WorkerId
from placement.rooms import kv_need_tokens
from placement.views import GroupView, Move, SampleView

_MOVES_PER_WORKER = 2  # enough to even out what one interval makes uneven


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """Attributes:
    interval_steps: at most one look in so many steps.
    horizon_steps: within which the moves have to pay.
    gain_ratio: by how much they have to pay more than they cost.
    full_length: room is counted for the full length of whoever is there, as an engine that must
        never preempt needs it; else for what they have.
    """

    interval_steps: int = 512
    horizon_steps: int = 1024
    gain_ratio: float = 1.5
    full_length: bool = False


def plan_moves(view: GroupView, costs: GroupCosts, settings: RebalanceSettings) -> tuple[Move, ...]:
    """From the heaviest to the lightest worker, the sample that is closest to half their gap.

    Nothing moves to where it has no room at its full length or no free slot. Nobody moves twice.
    """
    if len(view.workers) < 2 or not view.running:
        return ()
    loads = _Loads(view, settings.full_length)
    batch = len(view.running) / len(view.workers)
    width = len(view.workers)
    best: tuple[float, int] = (0.0, 0)
    moves: list[Move] = []
    before_s = costs.step_time.step_s(width, batch, loads.heaviest_tokens)
    cost_s = 0.0
    for _ in range(_MOVES_PER_WORKER * width):
        taken = loads.take_one()
        if taken is None:
            break
        sample, source, destination = taken
        kind, move_s = costs.cheaper_move(sample.context_tokens)
        cost_s += move_s
        moves.append(Move(sample.sample_id, source, destination, kind))
        after_s = costs.step_time.step_s(width, batch, loads.heaviest_tokens)
        gain_s = (before_s - after_s) * settings.horizon_steps - settings.gain_ratio * cost_s
        best = max(best, (gain_s, len(moves)))
    return tuple(moves[: best[1]])


class _Loads:
    """Workers by context, as samples move."""

    def __init__(self, view: GroupView, full_length: bool) -> None:
        self._full_length = full_length
        self._block_tokens = view.kv_block_tokens
        self._samples: dict[WorkerId, list[SampleView]] = {w.worker_id: [] for w in view.workers}
        for sample in sorted(view.running, key=lambda s: s.order):
            if sample.worker_id is not None:
                self._samples[sample.worker_id].append(sample)
        self._tokens = {w: _context_tokens(here) for w, here in self._samples.items()}
        self._limits = {w.worker_id: (w.max_samples, w.kv_capacity_tokens) for w in view.workers}
        self._moved: set[str] = set()
        self._heavy = [(-tokens, w) for w, tokens in self._tokens.items()]
        self._light = [(tokens, w) for w, tokens in self._tokens.items()]
        heapq.heapify(self._heavy)
        heapq.heapify(self._light)

    @property
    def heaviest_tokens(self) -> int:
        return max(self._tokens.values())

    def take_one(self) -> tuple[SampleView, WorkerId, WorkerId] | None:
        """Move the sample that evens heaviest and lightest out best; None if none does."""
        source, destination = self._top(self._heavy, -1), self._top(self._light, 1)
        gap = self._tokens[source] - self._tokens[destination]
        max_samples, capacity_tokens = self._limits[destination]
        if len(self._samples[destination]) >= max_samples:
            return None
        free_tokens = capacity_tokens - self._taken_tokens(destination)
        movable = [
            s
            for s in self._samples[source]
            if s.sample_id not in self._moved
            and s.context_tokens < gap
            and self._need_tokens(s) <= free_tokens
        ]
        if not movable:
            return None
        sample = min(movable, key=lambda s: (abs(s.context_tokens - gap / 2), s.order))
        self._moved.add(sample.sample_id)
        self._samples[source].remove(sample)
        self._samples[destination].append(sample)
        for worker_id, change in ((source, -1), (destination, 1)):
            self._tokens[worker_id] += change * sample.context_tokens
            heapq.heappush(self._heavy, (-self._tokens[worker_id], worker_id))
            heapq.heappush(self._light, (self._tokens[worker_id], worker_id))
        return sample, source, destination

    def _taken_tokens(self, worker_id: WorkerId) -> int:
        if self._full_length:
            return sum(map(self._need_tokens, self._samples[worker_id]))
        return self._tokens[worker_id]

    def _need_tokens(self, sample: SampleView) -> int:
        if self._full_length:
            return kv_need_tokens(sample.max_context_tokens, self._block_tokens)
        return sample.max_context_tokens

    def _top(self, heap: list[tuple[int, WorkerId]], sign: int) -> WorkerId:
        """The first entry that is still true; others are dropped."""
        while sign * heap[0][0] != self._tokens[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1]


def _context_tokens(samples: Sequence[SampleView]) -> int:
    return sum(s.context_tokens for s in samples)
