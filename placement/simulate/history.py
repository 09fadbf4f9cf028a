"""What a simulated rollout looked like while it went on: when each slot had samples to decode, and
how many samples were left. Kept only where somebody wants to see it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.simulate.workload import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Busy:
    """A slot's worker had samples to decode."""

    slot: int
    from_s: float
    until_s: float


@dataclass(eq=False)
class History:
    """Changes as the rollout goes on.

    Attributes:
        busy: per slot in order; adjoining ones are one.
        ends_s: when a sample ended, ascending, an entry per sample.
    """

    busy: dict[int, list[Busy]] = field(default_factory=dict)
    ends_s: list[float] = field(default_factory=list)

    def decoded(
        self,
        start_s: float,
        slots: Sequence[int],
        batch_WJ: Ints,
        step_s_J: Floats,
        last_steps: Ints,
    ) -> None:
        """A stretch of steps.

        Args:
            slots: of the members, in the order of ``batch_WJ``.
            last_steps: of the samples that ended, their last step in the stretch, from 1.
        """
        end_s_J = start_s + np.cumsum(step_s_J)
        self.ends_s += sorted(end_s_J[last_steps - 1].tolist())
        # Within a stretch nobody is admitted: who has run empty stays so.
        num_busy_W = np.count_nonzero(batch_WJ, axis=1)
        for slot, num_busy in zip(slots, num_busy_W.tolist(), strict=True):
            if num_busy:
                self._extend(slot, start_s, float(end_s_J[num_busy - 1]))

    def prefilled(self, from_s: float, until_s: float, slots: Iterable[int]) -> None:
        """KV was computed before the next step, with samples on these slots."""
        for slot in slots:
            self._extend(slot, from_s, until_s)

    def _extend(self, slot: int, from_s: float, until_s: float) -> None:
        spans = self.busy.setdefault(slot, [])
        # Sums of the same steps in another order differ in their last digits.
        if spans and math.isclose(spans[-1].until_s, from_s):
            from_s = spans.pop().from_s
        spans.append(Busy(slot, from_s, until_s))
