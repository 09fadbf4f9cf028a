"""What no schedule can beat: lower bounds of makespan and of occupied time.

Any schedule is a sequence of lockstep steps, each of some width w with some batch b and context
c on its average worker. It has to deliver all tokens, T, to hold every sample's context in each
of its steps, C token-steps in all (a worker holds at most the KV that its width leaves), and it
takes at least as many steps as the longest response has tokens, L. So the least cost is at least
that of a linear programme with three constraints, and by duality any prices of a token (p), of a
token-step of context (q) and of a step (r) at which no step is undercut give a bound::

    p T + q C + r L

The prices are scanned. Besides, the longest sample by itself takes its time, on no fewer workers
than the floor.

Left out, so that the bound stays below what can be reached: that a sample gives one token a step
and cannot be cut up to fill a gap, prefill, and all changes of the group.
"""

from dataclasses import dataclass

import numpy as np

from placement.simulate.admission import Floats
from placement.simulate.cluster import SimulatedCluster
from placement.simulate.workload import Workload

_BATCHES = 150
_PRICES = 40


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds and worker-seconds; each by itself, not both at once."""

    span_s: float
    occupied_worker_s: float


@dataclass(frozen=True, slots=True)
class _Demand:
    """T, C and L."""

    tokens: float
    held_token_steps: float
    steps: float


def bound_of(cluster: SimulatedCluster, workload: Workload) -> Bound:
    floor = cluster.floor(workload.max_context_tokens)
    width_C = np.arange(floor, cluster.num_workers + 1, dtype=float)[:, None]
    # Tokens of a step: at least one, at most a full batch on each worker.
    tokens_CB = np.geomspace(1.0, width_C[:, 0] * cluster.max_samples, _BATCHES, axis=1)
    # Without context: reading it is linear, so all of it is paid whatever the schedule.
    bare_s = cluster.step_time.steps_s(width_C, tokens_CB / width_C, 0.0)
    held_C = width_C * np.array(cluster.kv_tokens_at_width[floor:], float)[:, None]
    demand = _demand_of(workload)
    read_s = demand.held_token_steps * cluster.step_time.context_token_s
    longest_s = _longest_s(cluster, workload, width_C[:, 0])
    span_s = _dearest(bare_s, tokens_CB, held_C, demand) + read_s / cluster.num_workers
    occupied_s = _dearest(width_C * bare_s, tokens_CB, held_C, demand) + read_s
    return Bound(
        span_s=max(span_s, float(longest_s.min())),
        occupied_worker_s=max(occupied_s, float((longest_s * width_C[:, 0]).min())),
    )


def _demand_of(workload: Workload) -> _Demand:
    lengths = workload.response_tokens_N.astype(float)
    held = np.sum(lengths * workload.prompt_tokens_N + lengths * (lengths + 1) / 2)
    return _Demand(float(workload.total_tokens), float(held), float(workload.longest_tokens))


def _dearest(cost_CB: Floats, tokens_CB: Floats, held_C: Floats, demand: _Demand) -> float:
    """The most that the demand is worth at prices at which no step is undercut.

    Args:
        held_C: context that a step holds at most; one that holds less is undercut by less.
    """
    best = 0.0
    for held_price in np.linspace(0.0, float((cost_CB / held_C).min()), _PRICES):
        left_CB = cost_CB - held_price * held_C
        for step_price in np.linspace(0.0, float(left_CB.min()), _PRICES):
            token_price = float(((left_CB - step_price) / tokens_CB).min())
            worth = token_price * demand.tokens + float(step_price) * demand.steps
            best = max(best, worth + float(held_price) * demand.held_token_steps)
    return best


def _longest_s(cluster: SimulatedCluster, workload: Workload, width_C: Floats) -> Floats:
    """The longest sample by itself at each width: it is one of the group's batch at every step,
    and some worker holds its context."""
    longest = int(np.argmax(workload.response_tokens_N))
    steps = int(workload.response_tokens_N[longest])
    context = int(workload.prompt_tokens_N[longest]) * steps + steps * (steps + 1) / 2
    alone_s = cluster.step_time.steps_s(width_C, 1.0 / width_C, 0.0)
    return np.asarray(steps * alone_s + context * cluster.step_time.context_token_s)
