"""Fitting response lengths of one rollout while part of its samples still decode.

The logarithm of a response's length is its prompt's level plus noise within the prompt; the
level is a straight line through what earlier rollouts say about the prompt, plus noise::

    log length of a sample  = level[prompt] + noise of variance ``within_var``
    level[prompt]           = intercept + slope * past[prompt] + noise of variance ``level_var``

A sample that still decodes says only "longer than this". Leaving those out would make every
estimate too short (short responses end first), so they count with the weight and the value that
one Newton step on their likelihood gives them: next to nothing at their start, and nearly a
full observation once they are longer than believed.

Shapes: N = samples (ended and running), P = prompts.

Source: Tobit regression (J. Tobin, 1958) by iteratively reweighted least squares, and
empirical-Bayes shrinkage of the levels (a random-intercept model).
"""

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.remaining import Floats, hazard

_MOST_ITERATIONS = 30
_SETTLED = 2e-3  # the fit is good to a tenth of a standard deviation anyway
_LEAST_VAR = 1e-3
_MOST_TIMES_PRIOR = 4.0
"""Of a variance. While nearly all samples still run, "everything is far longer, and far more
spread" explains them as well as the truth does; what is no record of any batch is not believed."""


@dataclass(frozen=True, slots=True)
class LengthFit:
    """The parameters of the model, natural logarithms of tokens throughout.

    Attributes:
        intercept: mean level of a prompt about which the past says nothing.
        slope: what the past is worth: 1 where levels only shift, 0 where it says nothing.
        between_var: variance of levels, not knowing the past.
    """

    intercept: float
    slope: float
    within_var: float
    level_var: float
    between_var: float


@dataclass(frozen=True, slots=True)
class FitPrior:
    """What is believed before the rollout: a ``LengthFit`` and how firmly.

    Attributes:
        intercept_sd, slope_sd: how far a new policy may be from the last one.
        samples, prompts: the variances weigh like so many.
    """

    fit: LengthFit
    intercept_sd: float = 0.3
    slope_sd: float = 0.25
    samples: float = 64.0
    prompts: float = 64.0


@dataclass(frozen=True, slots=True)
class RolloutLengths:
    """What a rollout has shown so far.

    Attributes:
        prompt_N: index of each sample's prompt.
        log_tokens_N: log of its length, or of what it has while ``running_N``.
        past_P: what the past says about each prompt, as difference from the mean prompt and
            shrunk by how little it knows; 0 where there is none.
        has_past_P: the past says something.
    """

    prompt_N: NDArray[np.intp]
    log_tokens_N: Floats
    running_N: NDArray[np.bool_]
    past_P: Floats
    has_past_P: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Levels:
    """Each prompt's level and what supports it.

    Attributes:
        weight_P, total_P: number of observations behind a level (a running sample counts with
            its weight), and their sum.
    """

    level_P: Floats
    var_P: Floats
    weight_P: Floats
    total_P: Floats


def level_var_of(fit: LengthFit, has_past_P: NDArray[np.bool_]) -> Floats:
    return np.where(has_past_P, fit.level_var, fit.between_var)


def levels_from(
    fit: LengthFit, lengths: RolloutLengths, weight_P: Floats, total_P: Floats
) -> Levels:
    """Shrink each prompt's mean to the line."""
    prior_precision_P = 1.0 / level_var_of(fit, lengths.has_past_P)
    precision_P = prior_precision_P + weight_P / fit.within_var
    line_P = fit.intercept + fit.slope * lengths.past_P
    level_P = (prior_precision_P * line_P + total_P / fit.within_var) / precision_P
    return Levels(level_P, 1.0 / precision_P, weight_P, total_P)


def fit_lengths(
    lengths: RolloutLengths, prior: FitPrior, start: LengthFit
) -> tuple[LengthFit, Levels]:
    """Fit the rollout; ``start`` is where the iteration begins (the last fit, or the prior's)."""
    nothing_P = np.zeros(len(lengths.past_P))
    fit, levels = start, levels_from(start, lengths, nothing_P, nothing_P)
    for _ in range(_MOST_ITERATIONS):
        before = fit
        fit = _line(fit, prior, lengths)
        seen = _observe(lengths, levels.level_P[lengths.prompt_N], fit.within_var)
        levels = levels_from(fit, lengths, seen.weight_P, seen.total_P)
        fit = _variances(fit, prior, lengths, levels, seen)
        if _distance(before, fit) < _SETTLED:
            break
    return fit, levels_from(fit, lengths, levels.weight_P, levels.total_P)


@dataclass(frozen=True, slots=True)
class _Observed:
    """Samples as weighted observations; ``square_N`` is the expected square of their noise."""

    weight_N: Floats
    square_N: Floats
    weight_P: Floats
    total_P: Floats


def _observe(lengths: RolloutLengths, expected_N: Floats, noise_var: Floats | float) -> _Observed:
    """All samples around ``expected_N``, with noise of this variance."""
    sd = np.sqrt(noise_var)
    z_N = (lengths.log_tokens_N - expected_N) / sd
    rate_N = hazard(z_N)
    weight_N = np.where(lengths.running_N, np.clip(rate_N * (rate_N - z_N), 0.0, 1.0), 1.0)
    value_N = np.where(
        lengths.running_N, expected_N + sd / np.maximum(rate_N - z_N, 1e-6), lengths.log_tokens_N
    )
    square_N = np.where(lengths.running_N, noise_var * (1.0 + z_N * rate_N), (z_N * sd) ** 2)
    num_prompts = len(lengths.past_P)
    return _Observed(
        weight_N,
        square_N,
        np.bincount(lengths.prompt_N, weight_N, num_prompts).astype(np.float64),
        np.bincount(lengths.prompt_N, weight_N * value_N, num_prompts).astype(np.float64),
    )


def _line(fit: LengthFit, prior: FitPrior, lengths: RolloutLengths) -> LengthFit:
    """Intercept and slope: weighted least squares over prompts, held by the prior.

    Seen from the line a sample has the noise of its level too: around its own level a running
    sample would look less surprising than it is, and the line would come out too low.
    """
    level_var_P = level_var_of(fit, lengths.has_past_P)
    line_P = fit.intercept + fit.slope * lengths.past_P
    noise_var_N = fit.within_var + level_var_P[lengths.prompt_N]
    seen = _observe(lengths, line_P[lengths.prompt_N], noise_var_N)
    weight_P = np.maximum(seen.weight_P, 1e-9)
    mean_P, past_P = seen.total_P / weight_P, lengths.past_P
    precision_P = 1.0 / (level_var_P + fit.within_var / weight_P)
    prior_precision = np.array([prior.intercept_sd**-2, prior.slope_sd**-2])
    expected = np.array([prior.fit.intercept, prior.fit.slope])
    design = np.stack([np.ones_like(past_P), past_P])
    normal = (design * precision_P) @ design.T + np.diag(prior_precision)
    right = (design * precision_P) @ mean_P + prior_precision * expected
    intercept, slope = np.linalg.solve(normal, right)
    return replace(fit, intercept=float(intercept), slope=float(slope))


def _variances(
    fit: LengthFit, prior: FitPrior, lengths: RolloutLengths, levels: Levels, seen: _Observed
) -> LengthFit:
    """Each variance pooled with the prior's; a level counts as far as its samples show it."""
    shown_P = levels.weight_P / (
        levels.weight_P + fit.within_var / level_var_of(fit, lengths.has_past_P)
    )
    from_line_P = levels.level_P - fit.intercept - fit.slope * lengths.past_P
    from_mean_P = levels.level_P - fit.intercept
    known_P = shown_P * lengths.has_past_P
    return replace(
        fit,
        within_var=_pooled(prior.fit.within_var, prior.samples, seen.square_N, seen.weight_N),
        level_var=_pooled(
            prior.fit.level_var, prior.prompts, from_line_P**2 + levels.var_P, known_P
        ),
        between_var=_pooled(
            prior.fit.between_var, prior.prompts, from_mean_P**2 + levels.var_P, shown_P
        ),
    )


def _distance(one: LengthFit, other: LengthFit) -> float:
    return float(np.abs(np.subtract(astuple(one), astuple(other))).max())


def _pooled(prior_var: float, prior_weight: float, square: Floats, weight: Floats) -> float:
    total = prior_var * prior_weight + float(np.dot(square, weight))
    pooled_var = total / (prior_weight + float(weight.sum()))
    return min(max(_LEAST_VAR, pooled_var), _MOST_TIMES_PRIOR * prior_var)
