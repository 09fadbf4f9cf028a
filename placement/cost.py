"""What a decode step and a change of the group cost.

A step is priced by a roofline whose parameters are a handful of numbers: derived from data
sheets (``placement.hardware``) or fitted from measured steps. The kernels of a step run one
after another, so their times add; within the matrix products the slower of reading the weights
and multiplying counts::

    step = fixed + max(weights read, multiplied) + context read + exchange between workers

    weights read    experts_s * touched(width * batch) / width
    touched(n)      share of a layer's experts that n tokens reach: 1 - (1 - routed_ratio)^n
    multiplied      multiply_sample_s * batch
    context read    context_token_s * context
    exchange        exchange_sample_s * batch, where there is more than one worker

Batch and context are per worker. Workers step in lockstep: the experts are shared by the whole
batch, the attention waits for the worker with most context; who prices a group passes the mean
batch and the largest context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.errors import PlanError

Floats = npt.NDArray[np.float64]

_FIT_ROUNDS = 10  # which of the two roofs binds a step settles in two or three


class TimeUnit(StrEnum):
    """What the planner counts in.

    Where all workers share the same cores, narrowing the group makes every step faster only
    because fewer processes compete; ``STEPS`` charges every step as 1 whatever the width.
    """

    SECONDS = "seconds"
    STEPS = "steps"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step as it was measured. ``context_tokens_per_worker``: of the worker with most."""

    width: int
    batch_per_worker: float
    context_tokens_per_worker: float
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of one decode step.

    Attributes:
        fixed_s: launches, latencies, and dense weights, whatever the batch.
        experts_s: to read all routed experts of all layers on one worker.
        context_token_s: to read the KV of one token.
        multiply_sample_s: to multiply one token through the weights it uses.
        exchange_sample_s: to send one token's activations to its experts and back.
        routed_ratio: experts per token / experts per layer.
        unit: ``STEPS`` prices every step as 1.
    """

    fixed_s: float
    experts_s: float = 0.0
    context_token_s: float = 0.0
    multiply_sample_s: float = 0.0
    exchange_sample_s: float = 0.0
    routed_ratio: float = 1.0
    unit: TimeUnit = TimeUnit.SECONDS

    def __post_init__(self) -> None:
        for name in _TERMS:
            if not getattr(self, name) >= 0:
                raise PlanError(f"is {getattr(self, name)}; it must not be negative", field=name)
        if not 0 < self.routed_ratio <= 1:
            raise PlanError(f"is {self.routed_ratio}; it must be in (0, 1]", field="routed_ratio")

    def step_s(
        self, width: int, batch_per_worker: float, context_tokens_per_worker: float
    ) -> float:
        """One step of ``width`` workers; 1 where the unit is steps."""
        return float(
            self.steps_s(
                np.float64(width),
                np.float64(batch_per_worker),
                np.float64(context_tokens_per_worker),
            )
        )

    def steps_s(self, width: Any, batch_per_worker: Any, context_tokens_per_worker: Any) -> Floats:
        """``step_s`` for arrays that broadcast against each other."""
        width, batch, context = np.broadcast_arrays(
            np.asarray(width, float),
            np.asarray(batch_per_worker, float),
            np.asarray(context_tokens_per_worker, float),
        )
        if self.unit is TimeUnit.STEPS:
            return np.ones(width.shape)
        read_s = self.experts_s * _touched(self.routed_ratio, width * batch) / width
        return np.asarray(
            self.fixed_s
            + np.maximum(read_s, self.multiply_sample_s * batch)
            + self.context_token_s * context
            + np.where(width > 1, self.exchange_sample_s, 0.0) * batch
        )

    def fit(self, samples: Sequence[MeasuredStep]) -> "StepTimeModel":
        """The model of the same shape that is closest to measured steps, by relative error.

        Least squares with no term below zero. Terms that the steps say nothing about (one width
        only, a batch that never varied) go to the others; this model's own parameters only
        decide, at first, which roof binds which step.

        Raises:
            PlanError: no samples, or one that took no time.
        """
        if not samples:
            raise PlanError("no measured steps to fit; decode some first", field="samples")
        width, batch, context, took_s = np.array(
            [(s.width, s.batch_per_worker, s.context_tokens_per_worker, s.step_s) for s in samples],
            float,
        ).T
        if not np.all(took_s > 0):
            raise PlanError("a measured step took no time; leave it out", field="samples")
        read_share = _touched(self.routed_ratio, width * batch) / width
        model = replace(self, unit=TimeUnit.SECONDS)
        for _ in range(_FIT_ROUNDS):
            by_memory = model.experts_s * read_share >= model.multiply_sample_s * batch
            columns = np.stack(
                [
                    np.ones_like(batch),
                    np.where(by_memory, read_share, 0),
                    context,
                    np.where(by_memory, 0, batch),
                    np.where(width > 1, batch, 0),
                ],
                axis=1,
            )
            terms = _fit_without_negatives(columns / took_s[:, None], np.ones_like(took_s))
            fitted = replace(model, **dict(zip(_TERMS, terms.tolist(), strict=True)))
            if fitted == model:
                break
            model = fitted
        return replace(model, unit=self.unit)


_TERMS = ("fixed_s", "experts_s", "context_token_s", "multiply_sample_s", "exchange_sample_s")


def _touched(routed_ratio: float, num_tokens: Floats) -> Floats:
    """Share of a layer's experts that a batch of so many tokens reaches, routed evenly."""
    return np.asarray(1.0 - (1.0 - min(routed_ratio, 1 - 1e-12)) ** num_tokens)


def _fit_without_negatives(columns: Floats, target: Floats) -> Floats:
    """Least squares with coefficients >= 0: the best among all subsets of the columns.

    With five columns that is 31 small solutions, and exact.
    """
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    for chosen in product((False, True), repeat=columns.shape[1]):
        if not any(chosen):
            continue
        part = (columns / scale)[:, chosen]
        solution = np.linalg.lstsq(part, target, rcond=None)[0]
        error = float(np.sum((part @ solution - target) ** 2))
        if np.all(solution >= 0) and error < best_error - 1e-12:
            best = np.zeros(columns.shape[1])
            best[list(chosen)] = solution
            best_error = error
    return np.asarray(best / scale)


@dataclass(frozen=True, slots=True)
class ReconfigurationCost:
    """Seconds for which a change of the group holds decoding up.

    Attributes:
        rebuild_s: agreeing, swapping groups and maps, whatever moves.
        expert_bytes_per_s: rate at which one worker takes or gives experts.
        kv_bytes_per_s: the same for copied KV.
        unit: ``STEPS``: ``rebuild_s`` counts steps, and bytes cost nothing.
    """

    rebuild_s: float
    expert_bytes_per_s: float
    kv_bytes_per_s: float
    unit: TimeUnit = TimeUnit.SECONDS

    def __post_init__(self) -> None:
        if not self.rebuild_s >= 0:
            raise PlanError(f"is {self.rebuild_s}; it must not be negative", field="rebuild_s")
        for name in ("expert_bytes_per_s", "kv_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise PlanError(f"is {getattr(self, name)}; it must be above 0", field=name)

    def seconds(
        self, old_width: int, new_width: int, moved_expert_bytes: float, moved_kv_bytes: float
    ) -> float:
        """Bytes of the whole group. Those who take share them evenly and work side by side;
        in a release they are the new group, in a growth the joiners."""
        if old_width == new_width:
            return 0.0
        if self.unit is TimeUnit.STEPS:
            return self.rebuild_s
        takers = new_width if new_width < old_width else new_width - old_width
        return (
            self.rebuild_s
            + moved_expert_bytes / takers / self.expert_bytes_per_s
            + moved_kv_bytes / takers / self.kv_bytes_per_s
        )
