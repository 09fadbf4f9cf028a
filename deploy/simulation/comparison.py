"""Our rules against every baseline on one scenario, over several seeds, as ratios.

A ratio is ours over theirs on the same batch; over the seeds it becomes median, least and most.
Throughput and tokens per occupied worker-second always come as a pair: the second alone is won
by starting small.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.simulation.scenario import Scenario
from placement.simulate.bound import Bound, bound_of
from placement.simulate.contest import Entrant, Terms, play, static_widths
from placement.simulate.history import History
from placement.simulate.outcome import Outcome, WidthChange

Ratios = dict[str, float]

BASELINES: Mapping[str, Entrant] = {
    "chunk": Entrant.CHUNK,
    "round_robin": Entrant.ROUND_ROBIN,
    "least_loaded": Entrant.LEAST_LOADED,
    "idle_release": Entrant.IDLE_RELEASE,
    "half_once": Entrant.HALF_ONCE,
}
"""Best static width and oracle come apart: one is a choice, the other depends on the policy."""

STATIC = (Entrant.CHUNK, Entrant.ROUND_ROBIN, Entrant.LEAST_LOADED)


@dataclass(frozen=True, slots=True)
class Task:
    """One simulated rollout."""

    scenario: Scenario
    seed: int
    entrant: Entrant
    terms: Terms


@dataclass(frozen=True, slots=True)
class Figures:
    """What a comparison needs of an ``Outcome``."""

    throughput: float
    efficiency: float
    tokens_per_worker_step: float
    steps: int
    preempted_ratio: float
    idle_ratio: float
    changing_s: float
    num_moves: int
    changes: tuple[WidthChange, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> "Figures":
        return cls(
            throughput=outcome.throughput,
            efficiency=outcome.efficiency,
            tokens_per_worker_step=outcome.tokens_per_worker_step,
            steps=outcome.steps,
            preempted_ratio=outcome.preempted_tokens / outcome.total_tokens,
            idle_ratio=outcome.idle_worker_s / outcome.occupied_worker_s,
            changing_s=outcome.changing_s,
            num_moves=outcome.num_moves,
            changes=outcome.changes,
        )


def run_task(task: Task) -> Figures:
    return Figures.of(play_task(task))


def play_task(task: Task, history: History | None = None) -> Outcome:
    """Args:
    history: is told what happens on each slot.
    """
    scenario = task.scenario
    return play(
        scenario.cluster(),
        scenario.workload(task.seed),
        task.entrant,
        task.terms,
        misfortunes=scenario.misfortunes.simulated(),
        history=history,
    )


def run_all(tasks: Iterable[Task], processes: int) -> dict[Task, Figures]:
    """Each task once, in as many processes."""
    distinct = list(dict.fromkeys(tasks))
    if processes == 1:
        return {task: run_task(task) for task in distinct}
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(distinct, pool.map(run_task, distinct), strict=True))


def baseline_tasks(scenario: Scenario, seeds: Sequence[int]) -> list[Task]:
    """All that does not depend on our settings."""
    cluster = scenario.cluster()
    widths = static_widths(cluster, scenario.workload(seeds[0]).max_context_tokens)
    tasks = []
    for seed in seeds:
        tasks += [Task(scenario, seed, entrant, Terms()) for entrant in BASELINES.values()]
        tasks += [
            Task(scenario, seed, Entrant.LEAST_LOADED, Terms(width=width))
            for width in widths
            if width < cluster.num_workers
        ]
    return tasks


def compare(
    scenario: Scenario,
    seeds: Sequence[int],
    v: float,
    ours: Callable[[int], Task],
    oracle: Callable[[int], Task],
    done: Mapping[Task, Figures],
) -> dict[str, Any]:
    """The comparison as ``flexfloor simulate`` writes it.

    Args:
        v: the price, as it was asked for.
        ours, oracle: the task of a seed.
        done: all of these tasks and of ``baseline_tasks``, run.
    """
    mine = {seed: done[ours(seed)] for seed in seeds}
    fields: dict[str, Any] = {}
    for name, entrant in BASELINES.items():
        fields[name] = _pair(
            (mine[seed], done[Task(scenario, seed, entrant, Terms())]) for seed in seeds
        )
    fields["best_static_width"] = _pair(
        (mine[seed], fastest_static(scenario, seed, done)) for seed in seeds
    )
    fields["oracle"] = _pair((mine[seed], done[oracle(seed)]) for seed in seeds)
    return {
        "scenario": scenario.name,
        "v": v,
        "baselines": fields,
        "bound": _shares(scenario, seeds, mine, {seed: done[oracle(seed)] for seed in seeds}),
    }


def fastest_static(scenario: Scenario, seed: int, done: Mapping[Task, Figures]) -> Figures:
    """The static placement of most throughput, of any kind and width."""
    found = [
        figures
        for task, figures in done.items()
        if task.scenario == scenario and task.seed == seed and task.entrant in STATIC
    ]
    return max(found, key=lambda figures: figures.throughput)


def _shares(
    scenario: Scenario,
    seeds: Sequence[int],
    mine: Mapping[int, Figures],
    known: Mapping[int, Figures],
) -> dict[str, Any]:
    """How much of what no schedule can beat was reached, by us and with true lengths."""
    cluster = scenario.cluster()
    bounds: dict[int, tuple[Bound, int]] = {}
    for seed in seeds:
        workload = scenario.workload(seed)
        bounds[seed] = (bound_of(cluster, workload), workload.total_tokens)
    return {
        f"{whose}{figure}_share": spread(
            [getattr(figures[seed], figure) / _most(bounds[seed], figure) for seed in seeds]
        )
        for whose, figures in (("", mine), ("oracle_", known))
        for figure in ("throughput", "efficiency")
    }


def _most(bound: tuple[Bound, int], figure: str) -> float:
    least, tokens = bound
    return tokens / (least.span_s if figure == "throughput" else least.occupied_worker_s)


def _pair(pairs: Iterable[tuple[Figures, Figures]]) -> dict[str, Ratios]:
    both = list(pairs)
    return {
        f"{figure}_ratio": spread([getattr(a, figure) / getattr(b, figure) for a, b in both])
        for figure in ("throughput", "efficiency")
    }


def spread(values: Sequence[float]) -> Ratios:
    return {"median": median(values), "min": min(values), "max": max(values)}
