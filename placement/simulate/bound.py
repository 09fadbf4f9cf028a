"""What no schedule can beat: lower bounds of makespan and of occupied time.

Any schedule is a mixture of steps, each of some width w with some batch b and context c on its
average worker. It has to deliver all tokens, T, and to hold every sample's context in each of
its steps, C token-steps in all; a worker-step holds at most the KV that its width leaves. So a
bound is a linear programme with two constraints, and by duality any prices of a token (p) and of
a token-step of context (q) that no step beats give one: ``p T + q C``. The prices are scanned.

Besides, a rollout takes as many steps as its longest response, each at least as long as the
fastest step at that sample's context, on no fewer workers than the floor.

Left out, so that the bound is below what can be reached: that samples end one after another and
cannot be cut up, prefill, and all changes of the group.
"""

from dataclasses import dataclass

import numpy as np

from placement.simulate.admission import Floats
from placement.simulate.cluster import SimulatedCluster
from placement.simulate.workload import Workload

_BATCHES = 400
_PRICES = 400


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds and worker-seconds; each by itself, not both at once."""

    span_s: float
    occupied_worker_s: float


def bound_of(cluster: SimulatedCluster, workload: Workload) -> Bound:
    floor = cluster.floor(workload.max_context_tokens)
    width_C = np.arange(floor, cluster.num_workers + 1)[:, None]
    batch_B = np.unique(
        np.concatenate([np.geomspace(1e-3, 1, 40), np.geomspace(1, cluster.max_samples, _BATCHES)])
    )[None, :]
    # Without context: reading it is linear, so all of it is paid whatever the schedule.
    bare_s = cluster.step_time.steps_s(width_C, batch_B, 0.0)
    kv_tokens_C = np.array(cluster.kv_tokens_at_width[floor:], float)[:, None]
    lengths = workload.response_tokens_N.astype(float)
    held = float(np.sum(lengths * workload.prompt_tokens_N + lengths * (lengths + 1) / 2))
    tokens, read_s = float(workload.total_tokens), cluster.step_time.context_token_s
    longest_s = _longest_s(cluster, workload, width_C[:, 0].astype(float))
    # A worker-step costs its seconds; a step of the group costs them once, whatever its width.
    occupied_s = held * read_s + _dearest(bare_s, batch_B, kv_tokens_C, tokens, held)
    span_s = _dearest(bare_s, width_C * batch_B, width_C * kv_tokens_C, tokens, held)
    span_s += held * read_s / cluster.num_workers
    return Bound(
        span_s=max(span_s, float(longest_s.min())),
        occupied_worker_s=max(occupied_s, float((longest_s * width_C[:, 0]).min())),
    )


def _dearest(
    cost_CB: Floats, tokens_CB: Floats, held_CB: Floats, tokens: float, held: float
) -> float:
    """The most that ``tokens`` and ``held`` are worth at prices that no step undercuts.

    Args:
        held_CB: context that a step can hold at most; holding less is dearer per token-step.
    """
    best = 0.0
    for context_price in np.linspace(0.0, float((cost_CB / held_CB).min()), _PRICES):
        token_price = float(((cost_CB - context_price * held_CB) / tokens_CB).min())
        best = max(best, token_price * tokens + float(context_price) * held)
    return best


def _longest_s(cluster: SimulatedCluster, workload: Workload, width_C: Floats) -> Floats:
    """The longest sample by itself at each width: it is one of the group's batch at every step,
    and some worker holds its context."""
    longest = int(np.argmax(workload.response_tokens_N))
    steps = int(workload.response_tokens_N[longest])
    context = int(workload.prompt_tokens_N[longest]) * steps + steps * (steps + 1) / 2
    alone_s = cluster.step_time.steps_s(width_C, 1.0 / width_C, 0.0)
    return np.asarray(steps * alone_s + context * cluster.step_time.context_token_s)
