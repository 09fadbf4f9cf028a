"""What decode steps and changes of the group cost here, fitted from those that were made.

Until enough has been measured, a step costs the same at every width and nothing that moves costs
anything: then only the steps to the end decide. Experts move while decoding goes on, so of a
change only its pause counts.
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.protocol import ModelFacts
from actors.sample_record import SampleRecord
from placement.cost import MeasuredStep, ReconfigurationCost, StepTimeModel, TimeUnit
from placement.horizon import GroupCosts
from placement.ids import WorkerId

_STEPS_PER_POINT = 16
"""Steps whose median is one measured step: a single one is noise."""
_MOST_POINTS = 256
_POINTS_PER_FIT = 8
_MOST_CHANGES = 8
_FIRST_STEP_S = 0.05
_FIRST_PAUSE_S = 0.2
_PAUSE_STEPS = 2.0
"""Where steps are the unit: what a pause is counted as."""
_FREE = float("inf")


class MeasuredCosts:
    """Args:
    unit: None: steps where the engine runs on CPUs, whose cores the workers share, else seconds.
    can_copy: a moved sample's KV may be copied.
    """

    def __init__(self, unit: TimeUnit | None, can_copy: bool) -> None:
        self._unit = unit
        self._can_copy = can_copy
        self._waiting_s: list[float] = []
        self._points: deque[MeasuredStep] = deque(maxlen=_MOST_POINTS)
        self._num_unfitted = 0
        self._step_time = StepTimeModel(_FIRST_STEP_S)
        self._pauses_s: deque[float] = deque(maxlen=_MOST_CHANGES)

    def add_steps(
        self,
        width: int,
        steps_s: Sequence[float],
        running: Callable[[], Sequence[SampleRecord]],
    ) -> None:
        """Steps of a group of this width, with what it decodes now."""
        if self._unit is TimeUnit.STEPS:
            return
        self._waiting_s += [seconds for seconds in steps_s if seconds > 0]
        if len(self._waiting_s) < _STEPS_PER_POINT:
            return
        step_s, self._waiting_s = statistics.median(self._waiting_s), []
        context_tokens: Counter[WorkerId | None] = Counter()
        decoding = running()
        for record in decoding:
            context_tokens[record.worker_id] += record.context_tokens
        if not decoding:
            return
        self._points.append(
            MeasuredStep(width, len(decoding) / width, max(context_tokens.values()), step_s)
        )
        self._num_unfitted += 1
        if self._num_unfitted >= _POINTS_PER_FIT:
            self._step_time = self._step_time.fit(list(self._points))
            self._num_unfitted = 0

    def add_change(self, pause_s: float) -> None:
        """A change of the group held its survivors up for so long. What was measured of steps
        and not yet used was of another group."""
        self._waiting_s = []
        self._pauses_s.append(pause_s)

    def costs(
        self, facts: ModelFacts, recompute_token_s: float | None, kv_bytes_per_s: float | None
    ) -> GroupCosts:
        """Args:
        recompute_token_s, kv_bytes_per_s: as measured; None before the first move.
        """
        unit = self._unit or (TimeUnit.STEPS if facts.on_cpu else TimeUnit.SECONDS)
        self._step_time = replace(self._step_time, unit=unit)
        if facts.experts_per_token:
            self._step_time = replace(
                self._step_time, routed_ratio=facts.experts_per_token / facts.num_experts
            )
        counts_steps = unit is TimeUnit.STEPS
        pause_s = statistics.median(self._pauses_s) if self._pauses_s else _FIRST_PAUSE_S
        return GroupCosts(
            step_time=self._step_time,
            change=ReconfigurationCost(
                _PAUSE_STEPS if counts_steps else pause_s,
                _FREE,
                kv_bytes_per_s or _FREE,
                unit,
            ),
            num_experts=facts.num_experts,
            expert_bytes=facts.expert_bytes,
            kv_token_bytes=facts.kv_block_bytes // facts.kv_block_tokens,
            recompute_token_s=0.0 if counts_steps else recompute_token_s or 0.0,
            can_copy=self._can_copy and kv_bytes_per_s is not None,
        )
