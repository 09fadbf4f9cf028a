"""The benchmark suite: every scenario on every trace against every baseline, in virtual time.

    python -m benchmarks.suite [--scenario NAME ...] [--trace NAME ...] [--seeds N]
                                [--processes N] [--decisions]

Writes one file per scenario to benchmarks/results/simulated (so a part can be made again), the
cost of deciding beside them with --decisions, and then the page that shows them all. Numbers are
simulated: from data sheets, nothing is measured on a GPU.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decision_cost import measure_decisions
from benchmarks.page import write_page
from benchmarks.provenance import provenance
from deploy.simulation.comparison import (
    Figures,
    Task,
    baseline_tasks,
    compare,
    run_all,
    spread,
)
from deploy.simulation.scenario import (
    SCENARIOS,
    GroupedTrace,
    ProductionTrace,
    Scenario,
    SyntheticTrace,
    Trace,
    load_scenario,
)
from placement.cost import ReconfigurationCost
from placement.simulate.contest import Entrant, Terms, play

RESULTS = Path(__file__).parent / "results" / "simulated"
TRACES: Mapping[str, Trace] = {
    "deepseek-reasoner": GroupedTrace(run=28, history_run=38),
    "kimi-k2.5": GroupedTrace(run=38, history_run=107),
    "gpt-5.1-high": GroupedTrace(run=30, history_run=64),
    "claude-opus-4.6": GroupedTrace(run=85, history_run=32),
    "production deepseek-r1": ProductionTrace(kind="production"),
    "synthetic log-normal": SyntheticTrace(kind="synthetic"),
}
"""Groups with the history of another run on the same prompts; then one of a production service,
without groups or history; then the synthetic family."""

PRICES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREDICTION_ERRORS = (0.0, 0.15, 0.3, 0.6, 1.0)
COST_FACTORS = (0.25, 1.0, 4.0, 10.0)
PARETO_SEEDS = (0,)


def run_scenario(
    scenario: Scenario, traces: Sequence[str], seeds: Sequence[int], processes: int
) -> dict[str, Any]:
    """These traces, and on the first of them the Pareto curve and the sensitivities."""
    started = time.perf_counter()
    on_trace = {name: scenario.model_copy(update={"trace": TRACES[name]}) for name in traces}
    tasks = [task for s in on_trace.values() for task in _tasks(s, seeds)]
    main = on_trace[traces[0]]
    tasks += [_task(main, seed, Entrant.PLANNER, v) for seed in PARETO_SEEDS for v in PRICES]
    errors = {
        error: Task(main, PARETO_SEEDS[0], Entrant.ORACLE, Terms(scenario.v, error_sigma=error))
        for error in PREDICTION_ERRORS
    }
    done = run_all([*tasks, *errors.values()], processes)
    return {
        "simulated": True,
        **provenance(),
        "scenario": scenario.model_dump(mode="json"),
        "v": scenario.v,
        "seeds": list(seeds),
        "traces": {name: _on_trace(s, seeds, done) for name, s in on_trace.items()},
        "pareto": [
            {
                "v": v,
                **_against_chunk(
                    main, [_task(main, s, Entrant.PLANNER, v) for s in PARETO_SEEDS], done
                ),
            }
            for v in PRICES
        ],
        "prediction_error": [
            {"log_error_sigma": error, **_against_chunk(main, [task], done)}
            for error, task in errors.items()
        ],
        "reconfiguration_cost": _cost_sensitivity(main, done),
        "wall_s": round(time.perf_counter() - started, 1),
    }


def _tasks(scenario: Scenario, seeds: Sequence[int]) -> list[Task]:
    kinds = (Entrant.PLANNER, Entrant.ORACLE, Entrant.GUARANTEE, Entrant.ORACLE_GUARANTEE)
    ours = [_task(scenario, seed, kind, scenario.v) for seed in seeds for kind in kinds]
    return [*baseline_tasks(scenario, seeds), *ours]


def _task(scenario: Scenario, seed: int, entrant: Entrant, v: float) -> Task:
    return Task(scenario, seed, entrant, Terms(v=v))


def _on_trace(
    scenario: Scenario, seeds: Sequence[int], done: Mapping[Task, Figures]
) -> dict[str, Any]:
    modes = {
        "planner": (Entrant.PLANNER, Entrant.ORACLE),
        "guarantee": (Entrant.GUARANTEE, Entrant.ORACLE_GUARANTEE),
    }
    result: dict[str, Any] = {}
    for mode, (own, known) in modes.items():
        result[mode] = compare(
            scenario,
            seeds,
            scenario.v,
            lambda seed, own=own: _task(scenario, seed, own, scenario.v),
            lambda seed, known=known: _task(scenario, seed, known, scenario.v),
            done,
        )
    result["figures"] = {
        entrant: _medians(done[_task_or_plain(scenario, seed, entrant, done)] for seed in seeds)
        for entrant in Entrant
        if _task_or_plain(scenario, seeds[0], entrant, done) in done
    }
    return result


def _task_or_plain(
    scenario: Scenario, seed: int, entrant: Entrant, done: Mapping[Task, Figures]
) -> Task:
    priced = _task(scenario, seed, entrant, scenario.v)
    return priced if priced in done else Task(scenario, seed, entrant, Terms())


def _medians(all_figures: Iterable[Figures]) -> dict[str, float]:
    figures = list(all_figures)
    names = (
        "throughput",
        "efficiency",
        "tokens_per_worker_step",
        "steps",
        "preempted_ratio",
        "idle_ratio",
        "changing_s",
        "num_moves",
    )
    medians = {name: float(np.median([getattr(f, name) for f in figures])) for name in names}
    return {**medians, "num_changes": float(np.median([len(f.changes) for f in figures]))}


def _against_chunk(
    scenario: Scenario, tasks: Sequence[Task], done: Mapping[Task, Figures]
) -> dict[str, float]:
    chunk = {task.seed: done[Task(scenario, task.seed, Entrant.CHUNK, Terms())] for task in tasks}
    return {
        f"{figure}_ratio": spread(
            [getattr(done[t], figure) / getattr(chunk[t.seed], figure) for t in tasks]
        )["median"]
        for figure in ("throughput", "efficiency")
    }


def _cost_sensitivity(scenario: Scenario, done: Mapping[Task, Figures]) -> list[dict[str, float]]:
    """Changes that cost several times as much as on the data sheet, the planner knowing it."""
    seed, rows = PARETO_SEEDS[0], []
    chunk = done[Task(scenario, seed, Entrant.CHUNK, Terms())]
    cluster, workload = scenario.cluster(), scenario.workload(seed)
    for factor in COST_FACTORS:
        cost = cluster.reconfiguration
        dearer = ReconfigurationCost(
            cost.rebuild_s * factor,
            cost.expert_bytes_per_s / factor,
            cost.kv_bytes_per_s / factor,
        )
        outcome = play(
            replace(cluster, reconfiguration=dearer),
            workload,
            Entrant.PLANNER,
            Terms(v=scenario.v),
        )
        rows.append(
            {
                "factor": factor,
                "rebuild_s": dearer.rebuild_s,
                "num_changes": len(outcome.changes),
                "throughput_ratio": outcome.throughput / chunk.throughput,
                "efficiency_ratio": outcome.efficiency / chunk.efficiency,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    parser.add_argument("--scenario", action="append", choices=known, help="default: all")
    parser.add_argument("--trace", action="append", choices=list(TRACES), help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--decisions", action="store_true", help="measure the cost of deciding")
    chosen = parser.parse_args()
    provenance()  # refuses before anything is computed
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in chosen.scenario or known:
        result = run_scenario(
            load_scenario(name),
            chosen.trace or list(TRACES),
            range(chosen.seeds),
            chosen.processes,
        )
        _write(f"{name}.json", result)
        print(f"{name}: {result['wall_s']} s", flush=True)
    if chosen.decisions:
        _write("decisions.json", {**provenance(), "decisions": measure_decisions()})
    write_page(RESULTS)


def _write(name: str, result: dict[str, Any]) -> None:
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
