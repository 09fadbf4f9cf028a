"""How many workers there should be, and who leaves: the release planner.

It looks ahead (``placement.horizon``), finds the widths of least cost at its price of a freed
worker-second (``placement.programme``), and acts on the first of them if the samples really fit
there (``placement.survivors``). With a bound on the slowdown it chooses the price itself.

Invariants:
    - Nobody leaves while samples wait; the width never falls below the floor, and never to one
      where a sample would find no room.
    - It widens the group only for samples that have not started yet (new work), or where nothing
      can proceed. So without new work the width only falls, and a load has at most
      ``max_changes`` releases.
    - The same views in the same order give the same decisions.

Changes with every call: when it planned last, and how much of the slowdown it has used up.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.errors import PlanError
from placement.horizon import GroupCosts, Horizon, Ladder, Load, Prices, foresee, price
from placement.programme import Path, cheapest_path, dearest_affordable
from placement.release import IdlePolicy, decide_width, keep
from placement.remaining import Remaining
from placement.reserve import Reserve, ReserveTuner
from placement.survivors import Survivors, choose_survivors
from placement.views import GroupView, LengthBelief, Prediction, WidthDecision, WidthReason

_MOST_WIDTHS = 20  # finer ladders change the cost by less than the prediction errs
_DEFAULT_SIGMA = 1.0  # of a sample of which nothing is believed: anything up to its limit


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Attributes:
    price: v, of a freed worker-second, 0 (only the makespan counts) to 1 (only what is occupied).
    max_slowdown_ratio: if set, ``price`` is not used: as much is freed as possible while the
        load takes at most this share longer than without any release.
    replan_steps: least steps between two plans, unless a worker idles or the group changed.
    max_changes: most changes of the width in a load; then it keeps its width.
    least_ended_ratio: share of a load that must have ended before a busy worker leaves: until
        then it is not known how this rollout's lengths differ from the last one's.
    """

    price: float = 0.5
    max_slowdown_ratio: float | None = None
    replan_steps: int = 256
    max_changes: int = 8
    least_ended_ratio: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.price <= 1:
            raise PlanError(f"is {self.price}; it must be between 0 and 1", field="price")
        if self.max_slowdown_ratio is not None and not self.max_slowdown_ratio >= 0:
            raise PlanError(
                f"is {self.max_slowdown_ratio}; it must not be negative",
                field="max_slowdown_ratio",
            )
        if not 0 <= self.least_ended_ratio <= 1:
            raise PlanError(
                f"is {self.least_ended_ratio}; it must be between 0 and 1",
                field="least_ended_ratio",
            )
        for name in ("replan_steps", "max_changes"):
            if getattr(self, name) < 1:
                raise PlanError(f"is {getattr(self, name)}; it must be at least 1", field=name)


class ReleasePlanner:
    """A release rule (``placement.release.ReleaseRule``).

    Attributes:
        costs: may be replaced as more of them is measured.

    Args:
        tuner: shared with the dispatcher of the same group, which keeps it up to date.
    """

    def __init__(
        self, settings: PlannerSettings, costs: GroupCosts, tuner: ReserveTuner | None = None
    ) -> None:
        self._settings = settings
        self.costs = costs
        self._tuner = tuner or ReserveTuner(Reserve())
        self._planned_at: int | None = None
        self._planned_width = 0
        self._slack_s: float | None = None
        """What may still be lost to releases in this load."""

    def __call__(self, view: GroupView, idle_policy: IdlePolicy = IdlePolicy.ALL) -> WidthDecision:
        if view.nobody_leaves or not view.running:
            self._forget()
            return decide_width(view, idle_policy)
        if view.queued:
            return self._decide_growth(view, idle_policy)
        if waiting := self._what_forbids(view):
            return keep(view, waiting)
        self._planned_at, self._planned_width = view.steps, len(view.workers)
        return self._decide_release(view)

    def _what_forbids(self, view: GroupView) -> str:
        """Why no release is even thought about now; empty if nothing speaks against it."""
        settings = self._settings
        num_ended, load = view.num_ended, view.num_ended + len(view.running)
        if len(view.workers) <= view.floor_workers:
            return f"{len(view.workers)} workers are the floor"
        if view.num_changes >= settings.max_changes:
            return f"{view.num_changes} changes in this load are enough"
        if self._too_early(view):
            return f"planned at step {self._planned_at}, now it is {view.steps}"
        if not _some_idle(view) and num_ended < settings.least_ended_ratio * load:
            return f"only {num_ended} of {load} samples have ended"
        return ""

    def _forget(self) -> None:
        self._planned_at, self._slack_s = None, None

    def _too_early(self, view: GroupView) -> bool:
        if self._planned_at is None or len(view.workers) != self._planned_width:
            return False
        since = view.steps - self._planned_at
        if since < 0:  # another load
            self._forget()
            return False
        pace = self._settings.replan_steps
        return since < (pace // 4 if _some_idle(view) else pace)

    def _decide_growth(self, view: GroupView, idle_policy: IdlePolicy) -> WidthDecision:
        """New work is worth more workers; who was preempted waits for the others to end."""
        num_new = sum(sample.generated_tokens == 0 for sample in view.queued)
        if not num_new:
            return keep(view, f"{len(view.queued)} preempted samples wait for room")
        self._forget()
        return decide_width(view, idle_policy)

    # Releases

    def _decide_release(self, view: GroupView) -> WidthDecision:
        load = _load_of(view)
        horizon = foresee(load, self._settings.replan_steps)
        ladder = _ladder_of(view)
        prices = price(horizon, ladder, self.costs)
        need_N = self._tuner.reserve.needs(view.running, view.kv_block_tokens, load.remaining)
        able = _able_now(view, ladder, int(need_N.sum()))
        while True:
            prices = _only_now(prices, able)
            chosen, path = self._choose(view, horizon, ladder, prices)
            prediction = _prediction(horizon, prices, path)
            expected = f"{len(view.running)} samples, about {prediction.steps_without:.0f} steps"
            width = path.width_K[0]
            if width == len(view.workers):
                return keep(
                    view, f"{expected}: at price {chosen:.2f} no release pays now", prediction
                )
            survivors = choose_survivors(view, width, need_N)
            if survivors is not None:
                self._use_up(prediction)
                return _release(view, expected, chosen, survivors, prediction)
            # The sum would fit and the samples do not: nor will they on fewer workers.
            able = able & (np.array(ladder.widths) > width)

    def _choose(
        self, view: GroupView, horizon: Horizon, ladder: Ladder, prices: Prices
    ) -> tuple[float, Path]:
        most_slowdown = self._settings.max_slowdown_ratio
        if most_slowdown is None:
            chosen = self._settings.price
            return chosen, cheapest_path(horizon, ladder, prices, chosen, view.max_workers)
        staying_s = float(prices.decode_s_KC[:, -1].sum())
        if self._slack_s is None:
            self._slack_s = most_slowdown * staying_s
        return dearest_affordable(
            horizon, ladder, prices, view.max_workers, staying_s + self._slack_s
        )

    def _use_up(self, predicted: Prediction) -> None:
        if self._slack_s is not None:
            lost_s = predicted.seconds_with - predicted.seconds_without
            self._slack_s = max(0.0, self._slack_s - lost_s)


def _some_idle(view: GroupView) -> bool:
    return len({sample.worker_id for sample in view.running}) < len(view.workers)


def _load_of(view: GroupView) -> Load:
    """The running samples; of one without belief anything is possible up to its limit."""
    count = len(view.running)
    most_tokens = max(sample.max_context_tokens for sample in view.running)
    fallback = LengthBelief(math.log(most_tokens / 2), _DEFAULT_SIGMA)
    context_N = np.fromiter((s.context_tokens for s in view.running), np.float64, count)
    return Load(Remaining.of(view.running, fallback), context_N, np.ones(count))


def _ladder_of(view: GroupView) -> Ladder:
    """Widths from the floor to the present one."""
    now, floor = len(view.workers), max(1, view.floor_workers)
    rungs = np.unique(np.rint(np.geomspace(floor, now, _MOST_WIDTHS)).astype(int))
    widths = tuple(rungs.tolist())
    max_samples = min(worker.max_samples for worker in view.workers)
    return Ladder(widths, tuple(view.kv_tokens_at_width[w] for w in widths), max_samples)


def _able_now(view: GroupView, ladder: Ladder, need_tokens: int) -> NDArray[np.bool_]:
    """Widths that hold what runs now, by sample slots and by the sum of its KV."""
    width_C = np.array(ladder.widths)
    enough_kv_C = width_C * np.array(ladder.kv_tokens_C) >= need_tokens
    return np.asarray(enough_kv_C & (width_C * ladder.max_samples >= len(view.running)))


def _only_now(prices: Prices, able_C: NDArray[np.bool_]) -> Prices:
    fits_KC = prices.fits_KC.copy()
    fits_KC[0] &= able_C
    return replace(prices, fits_KC=fits_KC)


def _prediction(horizon: Horizon, prices: Prices, path: Path) -> Prediction:
    steps = float(horizon.steps.sum())
    return Prediction(
        steps_with=steps,
        steps_without=steps,
        seconds_with=path.seconds,
        seconds_without=float(prices.decode_s_KC[:, -1].sum()),
        freed_worker_steps=path.freed_worker_steps,
    )


def _release(
    view: GroupView, expected: str, chosen: float, survivors: Survivors, predicted: Prediction
) -> WidthDecision:
    moved_tokens = sum(sample.context_tokens for sample in survivors.moved)
    return WidthDecision(
        len(survivors.staying),
        survivors.leavers,
        WidthReason.CONSOLIDATE if survivors.moved else WidthReason.IDLE,
        f"{expected}: at price {chosen:.2f} {len(view.workers)} -> {len(survivors.staying)} "
        f"workers free {predicted.freed_worker_steps:.0f} worker-steps for "
        f"{predicted.seconds_with - predicted.seconds_without:+.1f} of "
        f"{predicted.seconds_without:.1f}; {len(survivors.moved)} samples with {moved_tokens} "
        f"tokens move",
        predicted,
    )
