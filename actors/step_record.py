"""How long a worker's steps take, and how long its samples wait for a token.

Written by the decode thread, read by any.
"""

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from actors.protocol import StepStats

if TYPE_CHECKING:  # vLLM is imported when a worker builds
    from actors.engines.vllm_engine import Engine

RECENT_STEPS = 64


class StepRecord:
    """Attributes:
    last_end_s: monotonic clock at the end of the last step, or at the last idle beat.
    """

    def __init__(self) -> None:
        self.last_end_s = time.monotonic()
        self._steps = 0
        self._step_s_sum = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Seconds, and the wall clock at the end, of each."""
        self._usual_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of steps without a prefill of ours."""
        self._prefilled_tokens = 0
        self._prefill_s = 0.0
        self._last_token_s: float | None = None
        self._max_token_gap_s = 0.0

    def idle_beat(self) -> None:
        self.last_end_s = time.monotonic()

    def step(
        self,
        start_s: float,
        end_s: float,
        *,
        made_tokens: bool,
        unfinished: bool,
        prefilled_tokens: int = 0,
    ) -> None:
        """A step was made, between two readings of the monotonic clock."""
        if prefilled_tokens:
            usual_s = statistics.median(self._usual_s) if self._usual_s else 0.0
            self._prefilled_tokens += prefilled_tokens
            self._prefill_s += max(0.0, end_s - start_s - usual_s)
        else:
            self._usual_s.append(end_s - start_s)
        self._steps += 1
        self._step_s_sum += end_s - start_s
        self._recent.append((end_s - start_s, time.time()))
        self.last_end_s = end_s
        if made_tokens:
            if self._last_token_s is not None:
                self._max_token_gap_s = max(self._max_token_gap_s, end_s - self._last_token_s)
            self._last_token_s = end_s
        if not unfinished:
            self._last_token_s = None

    def take_stats(self, engine: "Engine") -> StepStats:
        """Everything so far; the longest gap starts anew."""
        gap_s, self._max_token_gap_s = self._max_token_gap_s, 0.0
        recent = tuple(self._recent)
        copied_bytes, copied_s = engine.copied_kv
        return StepStats(
            steps=self._steps,
            step_s_sum=self._step_s_sum,
            last_step_age_s=time.monotonic() - self.last_end_s,
            running=engine.num_running,
            kv_used_tokens=engine.kv_used_tokens,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            max_token_gap_s=gap_s,
            recent_step_s=tuple(seconds for seconds, _ in recent),
            recent_step_end_at=tuple(end_at for _, end_at in recent),
            prefilled_tokens=self._prefilled_tokens,
            prefill_s=self._prefill_s,
            copied_kv_bytes=copied_bytes,
            copied_kv_s=copied_s,
            refused_kv=engine.refused_kv,
            preempted=engine.preempted,
        )
