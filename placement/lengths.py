"""How long responses will become, learned from the prompts' own past.

What it knows of a prompt is a mean log length, how much single samples differ from it, and how
many stand behind that. During a rollout it adds how that rollout differs (another policy writes
longer or shorter) and what the prompt's own samples show, the ones that still decode included
(``placement.length_fit``).

It does not trust itself: each ended sample is held against what would have been predicted for
it and against the batch's mean. ``skill`` is the share of the error that the prediction saved,
and while that is too little every prompt gets the same belief, so that a rule which prefers long
samples falls back to arrival order by itself.

Invariants:
    - The same calls give the same beliefs; nothing depends on time or on the order of a set.
    - No more than ``max_prompts`` prompts are remembered; the ones not seen for longest go first.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from placement.errors import PlanError
from placement.length_fit import (
    FitPrior,
    LengthFit,
    RolloutLengths,
    fit_lengths,
)
from placement.views import LengthBelief

_UNINFORMED = LengthFit(
    intercept=math.log(1000.0), slope=1.0, within_var=0.1, level_var=0.1, between_var=0.7
)
"""Before anything was seen. Variances as in recorded reasoning models: within a prompt the log
length has a standard deviation of about 0.3, between prompts of about 0.9."""

_UNINFORMED_SD = 2.0  # of the first intercept: anything from a sentence to a book
_DRIFT_SD = 0.3  # of later ones: how far one policy's mean log length may be from the last's
_LEAST_SKILL = 0.05
_LEAST_JUDGED = 24.0  # predictions behind a skill; fewer say nothing
_SKILL_MEMORY = 0.998  # of each judgement, per ended sample: about the last 500 count
_COMMON_FREEDOM = 8.0
"""Of the variance that all prompts share, in the estimate of one prompt's own. In recorded runs
the variances of prompts scatter as with 5 to 10, beside the scatter of a few samples."""
_PAST_MEMORY = 0.5  # of what is known of a prompt, per rollout in which it was seen


@dataclass(frozen=True, slots=True)
class PromptPast:
    """What earlier rollouts say of a prompt: ``weight`` samples of this mean log length.

    Attributes:
        squares: sum of the squared distances of log lengths from their rollout's mean.
        freedom: degrees of freedom of that sum.
    """

    prompt_key: str
    weight: float
    mean_log_tokens: float
    squares: float = 0.0
    freedom: float = 0.0


@dataclass(frozen=True, slots=True)
class LengthHistory:
    """All that a predictor knows, between rollouts. Prompts in the order they were last seen."""

    prompts: tuple[PromptPast, ...] = ()
    fit: LengthFit = _UNINFORMED
    num_rollouts: int = 0
    judged: float = 0.0
    error_predicted: float = 0.0
    error_mean: float = 0.0


@dataclass(slots=True)
class _Seen:
    """The samples of the current rollout that have ended."""

    prompt: list[int] = field(default_factory=list)
    log_tokens: list[float] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)


class LengthPredictor:
    """Beliefs about lengths; changes with every ``observe``, ``refresh`` and ``begin_rollout``.

    Args:
        history: what an earlier predictor knew.
        max_prompts: bound on the prompts remembered.
    """

    def __init__(self, history: LengthHistory | None = None, max_prompts: int = 200_000) -> None:
        if max_prompts < 1:
            raise PlanError(f"is {max_prompts}; it must be at least 1", field="max_prompts")
        self._max_prompts = max_prompts
        self._restore(history or LengthHistory())

    def _restore(self, history: LengthHistory) -> None:
        self._past = {past.prompt_key: past for past in history.prompts[-self._max_prompts :]}
        self._num_rollouts = history.num_rollouts
        self._judged = history.judged
        self._error_predicted = history.error_predicted
        self._error_mean = history.error_mean
        self._start(history.fit)

    def _start(self, fit: LengthFit) -> None:
        past = self._past.values()
        weight = sum(p.weight for p in past)
        self._past_mean = (
            sum(p.weight * p.mean_log_tokens for p in past) / weight if weight else fit.intercept
        )
        known = bool(self._num_rollouts)
        # Through the mean prompt of the past; a slope of 1 keeps every prompt's distance to it.
        first = LengthFit(self._past_mean, 1.0, fit.within_var, fit.level_var, fit.between_var)
        self._prior = FitPrior(first, _DRIFT_SD if known else _UNINFORMED_SD)
        self._fit = first
        self._index: dict[str, int] = {}
        self._x: list[float] = []
        self._has_past: list[bool] = []
        self._sums: list[tuple[float, float]] = []  # ended samples: weight, total
        self._squares: list[float] = []  # and the sum of squares
        self._support: list[tuple[float, float]] = []  # and running ones, as last refreshed
        self._seen = _Seen()

    # What is told

    def begin_rollout(self) -> None:
        """What was observed so far becomes the past; the next samples are another policy's."""
        if self._seen.prompt:
            self.refresh(())
        for key, i in self._index.items():
            weight, total = self._support[i]
            past = self._past.pop(key, None)
            squares, freedom = self._scatter_of(i)
            if past is not None:
                squares += _PAST_MEMORY * past.squares
                freedom += _PAST_MEMORY * past.freedom
                # The old mean as this rollout's policy would have it.
                moved = self._fit.intercept + self._fit.slope * (
                    past.mean_log_tokens - self._past_mean
                )
                kept = past.weight * _PAST_MEMORY
                weight, total = weight + kept, total + kept * moved
            if weight > 0:
                self._past[key] = PromptPast(key, weight, total / weight, squares, freedom)
        while len(self._past) > self._max_prompts:
            del self._past[next(iter(self._past))]
        self._num_rollouts += bool(self._seen.prompt)
        self._start(self._fit)

    def observe(self, prompt_key: str, response_tokens: int, censored: bool = False) -> None:
        """A sample of the current rollout has ended.

        Args:
            censored: it was cut (by its limit, or aborted): it would have become longer.

        Raises:
            PlanError: it has no tokens; there is nothing to learn from it.
        """
        if response_tokens < 1:
            raise PlanError(
                f"is {response_tokens} for prompt {prompt_key!r}; leave samples that ended before "
                "their first token out",
                field="response_tokens",
            )
        i = self._enter(prompt_key)
        y = math.log(response_tokens)
        self._judge(i, y, censored)
        self._seen.prompt.append(i)
        self._seen.log_tokens.append(y)
        self._seen.cut.append(censored)
        if not censored:  # a cut one counts from the next refresh on
            weight, total = self._sums[i]
            self._sums[i] = (weight + 1, total + y)
            self._squares[i] += y * y
            weight, total = self._support[i]
            self._support[i] = (weight + 1, total + y)

    def refresh(self, running: Iterable[tuple[str, int]]) -> None:
        """Fit anew with what runs now: (prompt key, tokens generated so far) of each sample.

        Between two refreshes an ended sample moves only its own prompt. Without any, beliefs
        are too short while a rollout lasts: the samples that end first are short.
        """
        started = [(self._enter(key), math.log(tokens)) for key, tokens in running if tokens > 0]
        if not started and not self._seen.prompt:
            return
        lengths = RolloutLengths(
            prompt_N=np.array(self._seen.prompt + [i for i, _ in started], dtype=np.intp),
            log_tokens_N=np.array(self._seen.log_tokens + [y for _, y in started]),
            running_N=np.array(self._seen.cut + [True] * len(started)),
            past_P=np.array(self._x),
            has_past_P=np.array(self._has_past),
        )
        self._fit, levels = fit_lengths(lengths, self._prior, self._fit)
        self._support = list(zip(levels.weight_P.tolist(), levels.total_P.tolist(), strict=True))

    # What is asked

    @property
    def skill(self) -> float:
        """Share of the squared error of log lengths that predicting saves over the batch's mean.

        At most 1; negative where predictions mislead; 0 while too few have been judged.
        """
        if self._judged < _LEAST_JUDGED or self._error_mean <= 0:
            return 0.0
        return 1.0 - self._error_predicted / self._error_mean

    @property
    def trusted(self) -> bool:
        return self.skill >= _LEAST_SKILL

    def belief(self, prompt_key: str) -> LengthBelief:
        """What a new sample of this prompt would become; the batch's prior without skill."""
        fit = self._fit
        if not self.trusted:
            return LengthBelief(fit.intercept, math.sqrt(fit.within_var + fit.between_var))
        i = self._index.get(prompt_key)
        x, known = self._past_of(prompt_key) if i is None else (self._x[i], self._has_past[i])
        weight, total = (0.0, 0.0) if i is None else self._support[i]
        level, var = self._level(x, known, weight, total)
        return LengthBelief(level, math.sqrt(self._within_var(prompt_key, i) + var))

    def history(self) -> LengthHistory:
        """What it knows at the end of the last rollout that was followed by ``begin_rollout``."""
        return LengthHistory(
            tuple(self._past.values()),
            self._fit,
            self._num_rollouts,
            self._judged,
            self._error_predicted,
            self._error_mean,
        )

    # Prompts

    def _enter(self, prompt_key: str) -> int:
        i = self._index.get(prompt_key)
        if i is None:
            i = self._index[prompt_key] = len(self._x)
            x, known = self._past_of(prompt_key)
            self._x.append(x)
            self._has_past.append(known)
            self._sums.append((0.0, 0.0))
            self._squares.append(0.0)
            self._support.append((0.0, 0.0))
        return i

    def _past_of(self, prompt_key: str) -> tuple[float, bool]:
        past = self._past.get(prompt_key)
        if past is None:
            return 0.0, False
        prior = self._prior.fit
        shrink = prior.between_var / (prior.between_var + prior.within_var / past.weight)
        return shrink * (past.mean_log_tokens - self._past_mean), True

    def _level(self, x: float, known: bool, weight: float, total: float) -> tuple[float, float]:
        """Mean and variance of one prompt's level; ``levels_from`` for a single prompt."""
        fit = self._fit
        prior_var = fit.level_var if known else fit.between_var
        precision = 1.0 / prior_var + weight / fit.within_var
        line = fit.intercept + fit.slope * x
        return (line / prior_var + total / fit.within_var) / precision, 1.0 / precision

    def _scatter_of(self, i: int) -> tuple[float, float]:
        """Squared distances of this rollout's ended samples from their mean, and how free."""
        weight, total = self._sums[i]
        if weight < 2:
            return 0.0, 0.0
        return max(0.0, self._squares[i] - total * total / weight), weight - 1

    def _within_var(self, prompt_key: str, i: int | None) -> float:
        """One prompt's variance of log lengths, shrunk to what all have in common."""
        squares, freedom = (0.0, 0.0) if i is None else self._scatter_of(i)
        past = self._past.get(prompt_key)
        if past is not None:
            squares, freedom = squares + past.squares, freedom + past.freedom
        common = self._fit.within_var
        return (_COMMON_FREEDOM * common + squares) / (_COMMON_FREEDOM + freedom)

    def _judge(self, i: int, y: float, censored: bool) -> None:
        """Hold the prediction against the ended sample, before it is learned from.

        Running samples are left out of it: one that runs for long would foretell itself.
        """
        weight, total = self._sums[i]
        if not (weight or self._has_past[i]):
            return
        predicted, _ = self._level(self._x[i], self._has_past[i], weight, total)
        mean = self._fit.intercept
        for name, expected in (("_error_predicted", predicted), ("_error_mean", mean)):
            missed = max(0.0, y - expected) if censored else y - expected
            setattr(self, name, getattr(self, name) * _SKILL_MEMORY + missed * missed)
        self._judged = self._judged * _SKILL_MEMORY + 1.0
