"""With how much KV a sample is counted when it is bound, between what it has and what it may need.

Counting every sample with its full length never preempts one and leaves most KV unused, because
most responses stay far below their limit. Counting it with what it has fills the KV and then
preempts. Between the two: what it has, plus a share of what it is expected to add. The share is
below 1 because samples on a worker are not all at their longest at the same moment; which share
is right is found out by running (``ReserveTuner``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.errors import PlanError
from placement.remaining import Remaining
from placement.views import GroupView, LengthBelief, SampleView

_NO_BELIEF = LengthBelief(0.0, 1.0)  # never read: those samples are counted with full length


@dataclass(frozen=True, slots=True)
class Reserve:
    """Attributes:
    ratio: share of the tokens expected to come.
    least_tokens: nobody is expected to add less than this, its limit apart.
    full_length: count everything to the limit, as an engine that must never preempt needs it.
    """

    ratio: float = 0.3
    least_tokens: int = 300
    full_length: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise PlanError(f"is {self.ratio}; it must be between 0 and 1", field="ratio")
        if self.least_tokens < 0:
            raise PlanError(
                f"is {self.least_tokens}; it must not be negative", field="least_tokens"
            )

    def needs(
        self,
        samples: Sequence[SampleView],
        kv_block_tokens: int,
        remaining: Remaining | None = None,
    ) -> NDArray[np.int64]:
        """KV tokens of each sample, in whole blocks; full length where nothing is believed.

        Args:
            remaining: of the same samples, where it has been made already.
        """
        count = len(samples)
        full_N = np.fromiter((s.max_context_tokens for s in samples), np.float64, count)
        if self.full_length or not count:
            return _whole_blocks(full_N, kv_block_tokens)
        context_N = np.fromiter((s.context_tokens for s in samples), np.float64, count)
        known_N = np.fromiter((s.belief is not None for s in samples), np.bool_, count)
        expected_N = (remaining or Remaining.of(samples, _NO_BELIEF)).expected_tokens()
        further_N = self.ratio * np.maximum(expected_N, self.least_tokens)
        need_N = np.where(known_N, np.minimum(context_N + further_N, full_N), full_N)
        return _whole_blocks(need_N, kv_block_tokens)


def _whole_blocks(tokens_N: NDArray[np.float64], block_tokens: int) -> NDArray[np.int64]:
    return (np.ceil(tokens_N / block_tokens) * block_tokens).astype(np.int64)


@dataclass(slots=True)
class ReserveTuner:
    """Finds the ratio while samples run: up after a preemption, down without.

    A preempted sample costs its context once more, and prefill is fast; an unused reserve costs
    samples that could decode beside the others, in every step. So it climbs only twice as fast as
    it sinks: in simulated batches a climb by a fifth and a sinking by a thirtieth left a tenth of
    the KV more unused, and brought up to 6 % less throughput.

    Attributes:
        interval_steps: at most one correction in so many steps: a preemption needs about that
            long to show that the last correction was not enough.
    """

    reserve: Reserve
    interval_steps: int = 64
    least_ratio: float = 0.05
    _corrected_at: int = 0
    _num_preempted: int = 0

    def update(self, view: GroupView) -> Reserve:
        """The reserve for this moment. ``view.steps`` may start again with a new load."""
        if view.steps < self._corrected_at or view.num_preempted < self._num_preempted:
            self._corrected_at = view.steps
            self._num_preempted = view.num_preempted
        elif view.steps - self._corrected_at >= self.interval_steps:
            ratio = self.reserve.ratio
            if view.num_preempted > self._num_preempted:
                ratio = min(1.0, ratio * 1.1 + 0.01)
            elif view.queued:  # with an empty queue nothing is kept out by the reserve
                ratio = max(self.least_ratio, ratio * 0.95)
            self.reserve = replace(self.reserve, ratio=ratio)
            self._corrected_at, self._num_preempted = view.steps, view.num_preempted
        return self.reserve
