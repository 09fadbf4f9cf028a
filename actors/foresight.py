"""What the coordinator foresees: how long responses become, and what to make of it.

Owns the length predictor, the dispatcher and the release planner of one group, and what steps and
changes were measured to cost. It is told of every sample that is accepted and that ends, and lends
the views their beliefs.

Invariants:
    - An engine that preempts a sample would undo what is known of it here, so every sample is
      counted with its full length and none ever is.
    - Beliefs are renewed at most ``_RENEWALS`` times while a load's samples end, and once in
      ``replan_steps``: deciding does not cost more for every token.
    - A replay's lengths were prescribed: what they teach ends with their load. Only
      ``planning.known_lengths`` shows them to the planner, as an oracle to compare with.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from actors.length_history import read_length_history, write_length_history
from actors.measured_costs import MeasuredCosts
from actors.protocol import ModelFacts
from actors.rollout import Rollout
from actors.sample_record import SampleRecord
from actors.settings import PlanningSettings, RuntimeSettings
from placement.cost import TimeUnit
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.errors import ConfigError
from placement.lengths import LengthHistory, LengthPredictor
from placement.planner import PlannerSettings, ReleasePlanner
from placement.rebalance import RebalanceSettings
from placement.release import IdlePolicy
from placement.reserve import Reserve, ReserveTuner
from placement.samples import FinishReason
from placement.views import DispatchPlan, GroupView, LengthBelief, WidthDecision

_log = logging.getLogger(__name__)

_RENEWALS = 24
_SAVE_INTERVAL_S = 60.0
"""Least time between two writings of the history: a load may be a single request."""


class Foresight:
    """Dispatch and release rule of a group, and all that they need to know of lengths and costs.

    Raises:
        ConfigError: there is a length history that cannot be used.
    """

    def __init__(
        self, settings: RuntimeSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        planning = settings.planning
        self._clock = clock
        self._path = Path(planning.length_history) if planning.length_history else None
        history = read_length_history(self._path) if self._path else LengthHistory()
        self._predictor = LengthPredictor(history)
        self._before_replay: LengthHistory | None = None
        self._learned = False
        self._saved_at = clock() - _SAVE_INTERVAL_S
        self._renew_steps = planning.replan_steps
        self._renewed_at: tuple[int, int] = (0, 0)
        self._belief_of: dict[str, LengthBelief] = {}
        self._knows_replays = planning.known_lengths
        self.measured = MeasuredCosts(
            None if planning.unit == "auto" else TimeUnit(planning.unit),
            settings.group.move_samples_by != "recompute",
        )
        tuner = ReserveTuner(Reserve(full_length=True))
        costs = self.measured.costs(_UNKNOWN_MODEL, None, None)
        self._dispatcher = Dispatcher(
            DispatchSettings(rebalance=_rebalance_settings(planning)), costs, tuner
        )
        self._planner = ReleasePlanner(
            PlannerSettings(
                price=planning.price,
                max_slowdown_ratio=planning.max_slowdown_ratio,
                replan_steps=planning.replan_steps,
                max_changes=planning.max_changes,
            ),
            costs,
            tuner,
        )

    # What is decided

    def dispatch(self, view: GroupView) -> DispatchPlan:
        return self._dispatcher(view)

    def decide_width(self, view: GroupView, idle_policy: IdlePolicy) -> WidthDecision:
        return self._planner(view, idle_policy)

    def price_with(
        self, facts: ModelFacts, recompute_token_s: float | None, kv_bytes_per_s: float | None
    ) -> None:
        """Decide by what has been measured so far."""
        costs = self.measured.costs(facts, recompute_token_s, kv_bytes_per_s)
        self._dispatcher.costs = self._planner.costs = costs

    # What is believed

    def belief_of(self, record: SampleRecord) -> LengthBelief:
        """Of one sample, which in a replay may be known."""
        replayed = record.sample.replay_stop_tokens
        if self._knows_replays and replayed is not None:
            return _certain(replayed)
        return self.belief(record.prompt_key)

    def belief(self, prompt_key: str) -> LengthBelief:
        """As it was when beliefs were renewed last."""
        belief = self._belief_of.get(prompt_key)
        if belief is None:
            belief = self._belief_of[prompt_key] = self._predictor.belief(prompt_key)
        return belief

    def renew(self, running: Callable[[], Sequence[SampleRecord]], steps: int, ended: int) -> None:
        """Learn from what still runs, if that is due.

        Args:
            steps, ended: of the load so far; both start anew with the next one.
        """
        at_step, at_ended = self._renewed_at
        new_load = steps < at_step or ended < at_ended
        due = steps - at_step >= self._renew_steps
        if not new_load and not due and ended == at_ended:
            return
        decoding = running()
        if not new_load and not due and (ended - at_ended) * _RENEWALS < ended + len(decoding):
            return
        self._renewed_at = (steps, ended)
        self._predictor.refresh((r.prompt_key, len(r.token_ids)) for r in decoding)
        self._belief_of.clear()

    # What is told

    def accepted(self, rollout: Rollout) -> None:
        replayed = rollout.request.replay_stop_tokens is not None
        if replayed and self._before_replay is None:
            self._before_replay = self._predictor.history()

    def ended(self, record: SampleRecord) -> None:
        """Whatever did not stop by itself would have become longer."""
        if record.token_ids:
            censored = record.finish_reason is not FinishReason.STOP
            self._predictor.observe(record.prompt_key, len(record.token_ids), censored)
            self._learned = True

    def take_over(self, open_rollouts: Iterable[Rollout]) -> None:
        """Rollouts of an earlier coordinator that go on."""
        for rollout in open_rollouts:
            self.accepted(rollout)
            for record in rollout.ended():
                self.ended(record)

    def load_ended(self) -> None:
        """What was learned is the past now, and is kept."""
        self._belief_of.clear()
        self._renewed_at = (0, 0)
        if self._before_replay is not None:
            self._predictor = LengthPredictor(self._before_replay)
            self._before_replay, self._learned = None, False
            return
        self._predictor.begin_rollout()
        if self._clock() - self._saved_at >= _SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Write the history, if there is anything new in it. A disk that does not take it costs
        what was learned since, and no rollout."""
        if self._path is None or not self._learned:
            return
        self._saved_at, self._learned = self._clock(), False
        try:
            write_length_history(self._path, self._predictor.history())
        except (OSError, ConfigError) as error:
            _log.error("what was learned about lengths is not kept: %s", error)


_certain = lru_cache(maxsize=4096)(LengthBelief.certain)
"""One object per length: the views of waiting samples are kept while their belief is the same."""


def _rebalance_settings(planning: PlanningSettings) -> RebalanceSettings | None:
    if not planning.rebalance:
        return None
    steps = planning.rebalance_steps
    return RebalanceSettings(interval_steps=steps, horizon_steps=2 * steps, full_length=True)


_UNKNOWN_MODEL = ModelFacts(
    num_layers=1,
    num_experts=1,
    vocab_size=1,
    max_model_len=1,
    eos_token_ids=(),
    expert_bytes=0,
    kv_block_bytes=0,
    kv_block_tokens=1,
    dense_bytes=0,
)
"""Nothing is decided before a worker has said what the model is."""
