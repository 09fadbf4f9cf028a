"""The pictures of docs/planning.md, and the numbers behind them.

    python -m benchmarks.planning_plots

One rollout over time, static chunks against ours; what each part of the planning adds; and the
curve over the price, from the suite's results. Everything is simulated, in virtual time.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.page import draw_curves
from benchmarks.provenance import ROOT, provenance
from benchmarks.spread import spread
from deploy.report.timeline import RolloutTimeline, leased_slots
from deploy.report.written import write_json
from deploy.simulation.comparison import Task
from deploy.simulation.scenario import Scenario, load_scenario
from deploy.simulation.timeline import simulate_timelines
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.release import IdlePolicy, keep
from placement.reserve import Reserve, ReserveTuner
from placement.simulate.contest import Entrant, Terms, costs_of, policy_of
from placement.simulate.foresight import PredictedLengths
from placement.simulate.policy import LivePolicy, Policy
from placement.simulate.rollout import simulate
from placement.views import GroupView, WidthDecision

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
SCENARIO = "30b-16"
CURVES = ("30b-16", "235b-64")
SEEDS = range(5)
ROLLOUT_PRICE = 0.8
"""At which this scenario's planner gives workers back; at 0.5 it finds none worth it."""

FIGURES = ("throughput", "efficiency")
LABELS = {
    "throughput": "throughput",
    "efficiency": "tokens per occupied worker-second",
}
CHUNK_COLOUR, OUR_COLOUR, LOSS_COLOUR = "#888888", "#2f6db5", "#c0504d"

STEPS: Mapping[str, str] = {
    "chunk": "static chunks",
    "late": "late binding",
    "longest": "longest first",
    "even": "evening out",
    "releases 0.5": "releases,\nv = 0.5",
    "releases 0.8": "releases,\nv = 0.8",
}
"""Each keeps what stands before it; the two prices of the releases are alternatives."""


def nobody_leaves(view: GroupView, idle_policy: IdlePolicy) -> WidthDecision:  # noqa: ARG001
    """A release rule."""
    return keep(view, "nobody leaves")


def policy_with(step: str, scenario: Scenario) -> Policy:
    """Ours, as far as this step."""
    cluster = scenario.cluster()
    costs, tuner = costs_of(cluster), ReserveTuner(Reserve())
    match step:
        case "chunk":
            return policy_of(Entrant.CHUNK, cluster, Terms())
        case "late":
            return policy_of(Entrant.LEAST_LOADED, cluster, Terms())
        case "longest":
            still = Dispatcher(DispatchSettings(rebalance=None), costs, tuner)
            return LivePolicy(step, still, nobody_leaves)
        case "even":
            return LivePolicy(step, Dispatcher(DispatchSettings(), costs, tuner), nobody_leaves)
        case _:
            price = float(step.split()[1])
            return policy_of(Entrant.PLANNER, cluster, Terms(v=price))


def pair_of(task: tuple[str, int]) -> dict[str, float]:
    """Throughput and efficiency of a step on the batch of a seed."""
    step, seed = task
    scenario = load_scenario(SCENARIO)
    workload = scenario.workload(seed)
    outcome = simulate(
        scenario.cluster(), workload, policy_with(step, scenario), PredictedLengths(workload)
    )
    return {figure: getattr(outcome, figure) for figure in FIGURES}


def gains() -> dict[str, dict[str, dict[str, float]]]:
    """Per step the ratios to chunk, on the same batch, over the seeds."""
    tasks = [(step, seed) for step in STEPS for seed in SEEDS]
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 8)) as pool:
        pairs = dict(zip(tasks, pool.map(pair_of, tasks), strict=True))
    return {
        step: {
            figure: spread(
                [pairs[step, seed][figure] / pairs["chunk", seed][figure] for seed in SEEDS]
            )
            for figure in FIGURES
        }
        for step in STEPS
    }


def draw_rollout(static: RolloutTimeline, elastic: RolloutTimeline, path: Path) -> None:
    figure, (widths, samples) = plt.subplots(
        2, 1, figsize=(9, 5), sharex=True, layout="constrained", height_ratios=(1.2, 1)
    )
    for timeline, colour, label in (
        (static, CHUNK_COLOUR, "static chunks"),
        (elastic, OUR_COLOUR, f"planner, v = {ROLLOUT_PRICE}"),
    ):
        times_s, counts = zip(*leased_slots(timeline), strict=True)
        widths.step(times_s, counts, where="post", color=colour, label=label)
        widths.fill_between(times_s, counts, step="post", color=colour, alpha=0.15)
        at_s, left = zip(*timeline.active_samples, strict=True)
        samples.step(at_s, left, where="post", color=colour)
    widths.set_ylabel("workers leased")
    widths.yaxis.set_major_locator(MaxNLocator(integer=True))
    widths.set_ylim(bottom=0)
    widths.legend(frameon=False)
    samples.set_ylabel("samples not yet ended")
    samples.set_ylim(bottom=0)
    samples.set_xlabel("seconds since the rollout was accepted")
    figure.suptitle(f"SIMULATED: one rollout of {SCENARIO}, the same batch twice", size=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_gains(found: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Bars that stand on each other: the medians, and what each step adds or takes."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, FIGURES, strict=True):
        medians = [found[step][name]["median"] for step in STEPS]
        # Both prices of the releases stand on what comes before them.
        below = [0.0, *medians[:4], medians[3]]
        for position, (bottom, top) in enumerate(zip(below, medians, strict=True)):
            colour = OUR_COLOUR if top >= bottom else LOSS_COLOUR
            axis.bar(
                position,
                top - bottom,
                bottom=bottom,
                color=CHUNK_COLOUR if not position else colour,
            )
            axis.annotate(
                f"{top:.2f}", (position, max(bottom, top)), ha="center", va="bottom", size=8
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(STEPS)), list(STEPS.values()), size=7)
        axis.set_title(f"{LABELS[name]} / static chunks", size=9)
    figure.suptitle(
        f"SIMULATED: {SCENARIO}, medians of {len(SEEDS)} batches; blue adds, red takes", size=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(names: Sequence[str]) -> dict[str, Any]:
    return {
        name: json.loads((RESULTS / "simulated" / f"{name}.json").read_text()) for name in names
    }


def main() -> None:
    made_of = provenance()  # refuses before anything is computed
    scenario = load_scenario(SCENARIO)
    chunk = Task(scenario, SEEDS[0], Entrant.CHUNK, Terms())
    ours = Task(scenario, SEEDS[0], Entrant.PLANNER, Terms(v=ROLLOUT_PRICE))
    timelines = simulate_timelines(scenario, (chunk, ours))
    static, elastic = timelines.rollouts
    found = gains()
    draw_rollout(static, elastic, DOCS / "planning-rollout.png")
    draw_gains(found, DOCS / "planning-gain.png")
    draw_curves(curves(CURVES), "pareto", "v", DOCS / "planning-pareto.png")
    write_json(
        {
            "simulated": True,
            **made_of,
            "scenario": scenario.model_dump(mode="json"),
            "seeds": list(SEEDS),
            "over_chunk": found,
            "rollout": {
                "v": ROLLOUT_PRICE,
                "note": timelines.note,
                **{
                    t.name: {"figures": asdict(t.figures), "changes": list(map(asdict, t.changes))}
                    for t in timelines.rollouts
                },
            },
        },
        RESULTS / "planning_plots.json",
    )


if __name__ == "__main__":
    main()
