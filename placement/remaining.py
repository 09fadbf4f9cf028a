"""What is left of a response, given what it has: the log-normal belief, conditioned and cut.

A belief (``LengthBelief``) is about a whole response. Here it is conditioned on the tokens that
are there already and cut at the response's limit, for many samples at once.

Everything goes through the logarithm of the normal survival function, which does not underflow:
a response far longer than anybody believed still has a finite expectation of going on.

Shapes: N = samples, K = points of a grid of further tokens.

Source: the complementary error function as a Chebyshev fit with a fractional error below 1.2e-7
everywhere, W. H. Press et al., Numerical Recipes, ``erfcc``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.views import LengthBelief, SampleView

Floats = NDArray[np.float64]

_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
    -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip
_LEAST_SIGMA = 1e-3  # a belief without doubt would make every surprise infinite


def log_normal_sf(z: Floats) -> Floats:
    """log P(Z > z) of a standard normal Z."""
    x = np.abs(z) / math.sqrt(2)
    t = 1.0 / (1.0 + 0.5 * x)
    polynomial = np.full_like(t, _ERFC[0])
    for coefficient in _ERFC[1:]:
        polynomial = polynomial * t + coefficient
    log_upper = np.log(0.5 * t) - x * x + polynomial
    return np.where(z >= 0, log_upper, np.log1p(-np.exp(log_upper)))


def hazard(z: Floats) -> Floats:
    """Density of a standard normal Z at z, given Z > z."""
    log_density = -0.5 * z * z - 0.5 * math.log(2 * math.pi)
    result: Floats = np.exp(log_density - log_normal_sf(z))
    return result


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of N running or waiting samples.

    Attributes:
        generated_N, limit_N: tokens there now, and at most. A sample at its limit has nothing
            left.
    """

    mu_N: Floats
    sigma_N: Floats
    generated_N: Floats
    limit_N: Floats

    @classmethod
    def of(cls, samples: Sequence[SampleView], fallback: LengthBelief) -> "Remaining":
        """Args:
        fallback: for samples without a belief.
        """
        beliefs = [fallback if s.belief is None else s.belief for s in samples]
        count = len(samples)
        generated_N = np.fromiter((s.generated_tokens for s in samples), np.float64, count)
        prompt_N = np.fromiter((s.context_tokens for s in samples), np.float64, count) - generated_N
        full_N = np.fromiter((s.max_context_tokens for s in samples), np.float64, count)
        return cls(
            np.fromiter((b.mu for b in beliefs), np.float64, count),
            np.maximum(np.fromiter((b.sigma for b in beliefs), np.float64, count), _LEAST_SIGMA),
            generated_N,
            full_N - prompt_N,
        )

    def take(self, index: NDArray[np.intp]) -> "Remaining":
        return Remaining(
            self.mu_N[index], self.sigma_N[index], self.generated_N[index], self.limit_N[index]
        )

    @property
    def most_tokens(self) -> Floats:
        """Tokens until the limit, by sample."""
        return np.maximum(self.limit_N - self.generated_N, 0.0)

    def roughly_expected_tokens(self) -> Floats:
        """As ``expected_tokens``, within a factor of two or so, for an order and quickly."""
        believed_N = np.exp(self.mu_N + 0.5 * self.sigma_N**2) - self.generated_N
        overdue_N = self.sigma_N * self.generated_N
        return np.asarray(np.minimum(np.maximum(believed_N, overdue_N), self.most_tokens))

    def survival(self, further_K: Floats) -> Floats:
        """P(the response becomes longer than now by more than k tokens), by (k, sample).

        0 from the limit on.
        """
        already_N = self._log_sf(self.generated_N)
        longer_KN = self.generated_N[None, :] + further_K[:, None]
        survival_KN = np.exp(np.minimum(self._log_sf(longer_KN) - already_N[None, :], 0.0))
        return np.where(longer_KN < self.limit_N[None, :], survival_KN, 0.0)

    def expected_tokens(self) -> Floats:
        """Mean of the tokens still to come, by sample."""
        variance_N = self.sigma_N**2
        z_now_N, z_limit_N = self._z(self.generated_N), self._z(self.limit_N)
        log_now_N = log_normal_sf(z_now_N)
        # The mean of a log-normal beyond a point is the same survival function, shifted.
        beyond_now_N = log_normal_sf(z_now_N - self.sigma_N) - log_now_N
        beyond_limit_N = log_normal_sf(z_limit_N - self.sigma_N) - log_now_N
        log_mean_N = self.mu_N + 0.5 * variance_N
        length_N = (
            np.exp(log_mean_N + beyond_now_N)
            - np.exp(log_mean_N + beyond_limit_N)
            + self.limit_N * np.exp(log_normal_sf(z_limit_N) - log_now_N)
        )
        return np.asarray(np.clip(length_N - self.generated_N, 0.0, self.most_tokens))

    def _z(self, tokens: Floats) -> Floats:
        return np.asarray((np.log(np.maximum(tokens, 1.0)) - self.mu_N) / self.sigma_N)

    def _log_sf(self, tokens: Floats) -> Floats:
        return log_normal_sf(self._z(tokens))
