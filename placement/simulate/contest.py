"""Who takes part in a comparison: our rules, and every baseline, by name."""

from dataclasses import dataclass
from enum import StrEnum

from placement.dispatch import plan_dispatch
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.horizon import GroupCosts
from placement.planner import PlannerSettings, ReleasePlanner
from placement.release import decide_width
from placement.reserve import Reserve, ReserveTuner
from placement.simulate.baselines import Baseline, HalfOnce, IdleRelease, Placement
from placement.simulate.cluster import Misfortunes, SimulatedCluster
from placement.simulate.foresight import Foresight, PredictedLengths, TrueLengths
from placement.simulate.history import History
from placement.simulate.outcome import Outcome
from placement.simulate.policy import LivePolicy, Policy
from placement.simulate.rollout import NO_MISFORTUNES, simulate
from placement.simulate.workload import Workload


class Entrant(StrEnum):
    PLANNER = "planner"  # ours, at the price v
    GUARANTEE = "guarantee"  # ours, choosing the price itself within a bound on the makespan
    ORACLE = "oracle"  # the planner with true lengths
    ORACLE_GUARANTEE = "oracle_guarantee"
    SIMPLE = "simple"  # the rules that know no lengths
    CHUNK = "chunk"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    IDLE_RELEASE = "idle_release"
    HALF_ONCE = "half_once"


@dataclass(frozen=True, slots=True)
class Terms:
    """Attributes:
    v: price of a freed worker-second.
    max_slowdown_ratio: of the guarantee mode.
    width: of a static placement; None for all workers.
    error_sigma: spread of the factor by which an oracle errs.
    """

    v: float = 0.5
    max_slowdown_ratio: float = 0.0
    width: int | None = None
    error_sigma: float = 0.0


def play(
    cluster: SimulatedCluster,
    workload: Workload,
    entrant: Entrant,
    terms: Terms,
    believed: SimulatedCluster | None = None,
    misfortunes: Misfortunes = NO_MISFORTUNES,
    history: History | None = None,
) -> Outcome:
    """One rollout.

    Args:
        believed: what our rules take the cluster's costs for, if they are wrong about them.
        history: is told what happens on each slot.
    """
    policy = policy_of(entrant, believed or cluster, terms)
    foresight = _foresight_of(entrant, workload, terms)
    return simulate(cluster, workload, policy, foresight, misfortunes, history)


def policy_of(entrant: Entrant, cluster: SimulatedCluster, terms: Terms) -> Policy:
    match entrant:
        case Entrant.PLANNER | Entrant.ORACLE:
            return _planned(entrant, cluster, PlannerSettings(price=terms.v))
        case Entrant.GUARANTEE | Entrant.ORACLE_GUARANTEE:
            settings = PlannerSettings(max_slowdown_ratio=terms.max_slowdown_ratio)
            return _planned(entrant, cluster, settings)
        case Entrant.SIMPLE:
            return LivePolicy(entrant, plan_dispatch, decide_width)
        case Entrant.IDLE_RELEASE:
            return Baseline(entrant, Placement.LEAST_LOADED, release=IdleRelease())
        case Entrant.HALF_ONCE:
            return Baseline(entrant, Placement.LEAST_LOADED, release=HalfOnce())
        case _:
            return Baseline(entrant, Placement(entrant), terms.width)


def costs_of(cluster: SimulatedCluster) -> GroupCosts:
    return GroupCosts(
        step_time=cluster.step_time,
        change=cluster.reconfiguration,
        num_experts=cluster.num_experts,
        expert_bytes=cluster.expert_bytes,
        kv_token_bytes=cluster.kv_token_bytes,
        recompute_token_s=cluster.prefill_token_s,
    )


def _planned(entrant: Entrant, cluster: SimulatedCluster, settings: PlannerSettings) -> Policy:
    costs, tuner = costs_of(cluster), ReserveTuner(Reserve())
    return LivePolicy(
        entrant,
        Dispatcher(DispatchSettings(), costs, tuner),
        ReleasePlanner(settings, costs, tuner),
    )


def _foresight_of(entrant: Entrant, workload: Workload, terms: Terms) -> Foresight:
    if entrant in (Entrant.ORACLE, Entrant.ORACLE_GUARANTEE):
        return TrueLengths(workload, terms.error_sigma)
    return PredictedLengths(workload)


def static_widths(cluster: SimulatedCluster, max_context_tokens: int) -> tuple[int, ...]:
    """Widths at which a static placement is tried: all workers, and down to a half,
    as far as the floor allows."""
    full, floor = cluster.num_workers, cluster.floor(max_context_tokens)
    wanted = (full, 3 * full // 4, full // 2)
    return tuple(width for width in dict.fromkeys(wanted) if width >= floor)
