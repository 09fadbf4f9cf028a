"""What is going to happen to a load, in expectation, and what it costs at each width.

A *load* is the samples that run now. ``foresee`` lays a grid over the tokens that they may still
add and says, for each stretch of it, how likely any sample is left and how large batch and
context then are. ``price`` turns that into seconds for every width of a ladder. What to make of
it is ``placement.planner``'s question.

Shapes: N = samples, K = stretches of the grid, J = points within a stretch, C = widths of the
ladder, ascending.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.remaining import Floats, Remaining
from placement.views import MoveKind

_STRETCHES = 24
_MOST_SAMPLES = 1024  # beyond that, samples stand for several: the sums hardly change
_EXACT_SAMPLES = 256  # those with most to come decide when the load ends, and stand for themselves
_EVALUATIONS = 65_536  # samples x points: bounds the time of a look ahead
_KV_MARGIN = 1.12  # contexts do not spread evenly, and their sum is only expected
_NEVER = 0.02  # what happens less often than this forbids no width


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What decoding and changing the group cost, for one model on one kind of machine.

    Attributes:
        num_experts: per layer.
        expert_bytes: one expert in all layers.
        recompute_token_s: to recompute one token of a moved sample; infinite where only copies
            are possible.
        can_copy: KV can be copied between workers.
    """

    step_time: StepTimeModel
    change: ReconfigurationCost
    num_experts: int = 0
    expert_bytes: int = 0
    kv_token_bytes: int = 0
    recompute_token_s: float = 0.0
    can_copy: bool = True

    def cheaper_move(self, context_tokens: int) -> tuple[MoveKind, float]:
        """How to move one sample, and the seconds that takes."""
        recompute_s = context_tokens * self.recompute_token_s
        copy_s = context_tokens * self.kv_token_bytes / self.change.kv_bytes_per_s
        if self.can_copy and copy_s < recompute_s:
            return MoveKind.COPY, copy_s
        return MoveKind.RECOMPUTE, recompute_s

    def moved_token_s(self, old_width: int, new_width: int) -> float:
        """Seconds for each token of context that a release moves; survivors share the work."""
        many = 1 << 20  # seconds() is linear in bytes; the difference is the slope
        copy_s = (
            self.change.seconds(old_width, new_width, 0, many * self.kv_token_bytes)
            - self.change.seconds(old_width, new_width, 0, 0)
        ) / many
        recompute_s = self.recompute_token_s / new_width
        return min(copy_s, recompute_s) if self.can_copy else recompute_s


@dataclass(frozen=True, slots=True)
class Load:
    """Attributes:
    weight_N: how many samples each entry stands for.
    """

    remaining: Remaining
    context_N: Floats
    weight_N: Floats

    def thinned(self) -> "Load":
        """At most about ``_MOST_SAMPLES`` entries with the same sums."""
        count = len(self.context_N)
        if count <= _MOST_SAMPLES:
            return self
        order = np.argsort(-self.remaining.roughly_expected_tokens(), kind="stable")
        first, rest = order[:_EXACT_SAMPLES], order[_EXACT_SAMPLES:]
        stride = -(-len(rest) // (_MOST_SAMPLES - _EXACT_SAMPLES))
        kept = rest[stride // 2 :: stride]
        index = np.concatenate([first, kept])
        weight_N = np.ones(len(index))
        weight_N[_EXACT_SAMPLES:] = len(rest) / len(kept)
        return Load(self.remaining.take(index), self.context_N[index], weight_N)


@dataclass(frozen=True, slots=True)
class Horizon:
    """A load's expected future, given each time that any sample is left.

    Attributes:
        tokens_K: length of a point's share of its stretch.
        any_KJ: probability that any sample is left at that point; ``start_any_K`` where the
            stretch begins.
        batch_KJ, context_KJ, longest_KJ: samples, sum and largest of their contexts.
    """

    tokens_K: Floats
    any_KJ: Floats
    start_any_K: Floats
    batch_KJ: Floats
    context_KJ: Floats
    longest_KJ: Floats

    @property
    def steps(self) -> Floats:
        """Expected steps of each stretch; their sum is that until the last sample has ended."""
        return np.asarray(self.any_KJ.sum(axis=1) * self.tokens_K)


def foresee(load: Load, first_steps: int) -> Horizon:
    """Args:
    first_steps: length of the first stretch; nothing is decided again before its end.
    """
    load = load.thinned()
    edges = _grid(load, first_steps)
    num_points = int(np.clip(_EVALUATIONS // (len(load.context_N) * (len(edges) - 1)), 1, 16))
    offset_J = (np.arange(num_points) + 0.5) / num_points
    length_K = np.diff(edges)
    points_KJ = edges[:-1, None] + length_K[:, None] * offset_J
    points = np.concatenate([points_KJ.ravel(), edges[:-1]])

    survival = load.remaining.survival(points)
    none_left = np.log1p(-np.minimum(survival, 1 - 1e-12)) @ load.weight_N
    any_left = -np.expm1(none_left)
    given = np.maximum(any_left, 1e-12)
    batch = (survival @ load.weight_N) / given
    context = survival @ (load.weight_N * load.context_N) / given + batch * points
    longest = np.where(survival > 0.5, load.context_N, 0.0).max(axis=1) + points
    num, shape = points_KJ.size, points_KJ.shape
    return Horizon(
        tokens_K=length_K / num_points,
        any_KJ=any_left[:num].reshape(shape),
        start_any_K=any_left[num:],
        batch_KJ=np.maximum(batch[:num].reshape(shape), 1.0),
        context_KJ=context[:num].reshape(shape),
        longest_KJ=longest[:num].reshape(shape),
    )


def _grid(load: Load, first_steps: int) -> Floats:
    """Edges from 0 to the last token that any sample may add.

    Half of them at the expected ends of the last, 2nd, 4th, ... sample, where the load changes
    most; half in geometric steps.
    """
    expected_N = np.sort(load.remaining.expected_tokens())[::-1]
    end = _last_end(load, float(expected_N[0]))
    first = min(float(first_steps), end)
    half = _STRETCHES // 2
    ranks = np.unique(np.geomspace(1, len(expected_N), half).astype(np.int64)) - 1
    edges = np.concatenate([np.geomspace(first, end, half), expected_N[ranks]])
    return np.concatenate([[0.0], np.unique(np.clip(np.rint(edges), max(1.0, first), None))])


def _last_end(load: Load, expected: float) -> float:
    """Where almost certainly nothing is left."""
    most = max(1.0, float(load.remaining.most_tokens.max()))
    end = max(1.0, expected)
    while end < most:
        if (load.remaining.survival(np.array([end]))[0] @ load.weight_N) < 0.01:
            break
        end *= 1.25
    return min(end, most) + 1.0


@dataclass(frozen=True, slots=True)
class Ladder:
    """The widths that are thought about, and what a worker has room for at each.

    Attributes:
        max_samples: most samples that one worker decodes at once.
    """

    widths: tuple[int, ...]
    kv_tokens_C: tuple[int, ...]
    max_samples: int


@dataclass(frozen=True, slots=True)
class Prices:
    """Attributes:
    decode_s_KC: expected seconds of each stretch; infinite where the load does not fit.
    change_s_KCC: expected seconds of a change [from, to] where the stretch begins; infinite
        from narrow to wide.
    """

    decode_s_KC: Floats
    fits_KC: NDArray[np.bool_]
    change_s_KCC: Floats


def price(horizon: Horizon, ladder: Ladder, costs: GroupCosts) -> Prices:
    """Seconds of every stretch at every width, and of every change between them."""
    width_C = np.array(ladder.widths, dtype=np.float64)
    batch_KJC = horizon.batch_KJ[:, :, None] / width_C
    mean_KJC = horizon.context_KJ[:, :, None] / width_C
    longest_KJC = np.broadcast_to(horizon.longest_KJ[:, :, None], mean_KJC.shape)
    step_s_KJC = costs.step_time.steps_s(width_C, batch_KJC, np.maximum(mean_KJC, longest_KJC))
    steps_KJC = (horizon.any_KJ * horizon.tokens_K[:, None])[:, :, None]
    decode_s_KC = (step_s_KJC * steps_KJC).sum(axis=1)
    kv_C = np.array(ladder.kv_tokens_C, dtype=np.float64)
    fits_KJC = (
        (mean_KJC * _KV_MARGIN <= kv_C)
        & (longest_KJC <= kv_C)
        & (np.ceil(batch_KJC) <= ladder.max_samples)
    ) | (horizon.any_KJ[:, :, None] < _NEVER)
    return Prices(
        decode_s_KC, np.asarray(fits_KJC.all(axis=1)), _change_s(horizon, ladder.widths, costs)
    )


def _change_s(horizon: Horizon, widths: Sequence[int], costs: GroupCosts) -> Floats:
    """Leavers hand their share of the experts and of the contexts over."""
    all_experts_bytes = costs.expert_bytes * costs.num_experts
    context_K, any_K = horizon.context_KJ[:, 0], horizon.start_any_K
    change_s_KCC = np.full((len(context_K), len(widths), len(widths)), np.inf)
    for i, old in enumerate(widths):
        change_s_KCC[:, i, i] = 0.0
        for j, new in enumerate(widths[:i]):
            share = (old - new) / old
            fixed_s = costs.change.seconds(old, new, all_experts_bytes * share, 0)
            token_s = costs.moved_token_s(old, new)
            change_s_KCC[:, i, j] = any_K * (fixed_s + token_s * share * context_K)
    return change_s_KCC
