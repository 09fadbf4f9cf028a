"""``flexfloor simulate``: one scenario, our rules against every baseline."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.report.picture import draw
from deploy.report.table import compare_figures, steps_cell
from deploy.report.timeline import Timelines
from deploy.report.written import write_json
from deploy.simulation.comparison import Task, baseline_tasks, compare, run_all
from deploy.simulation.scenario import load_scenario
from deploy.simulation.timeline import simulate_timelines
from placement.simulate.contest import Entrant, Terms

MOST_PROCESSES = 8
TIMELINE_NAME, PICTURE_NAME = "timeline.json", "timeline.png"


class PolicyName(StrEnum):
    PLANNER = "planner"
    GUARANTEE = "guarantee"
    SIMPLE = "simple"
    CHUNK = "chunk"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    IDLE_RELEASE = "idle_release"
    HALF_ONCE = "half_once"


def simulate_command(
    scenario: Annotated[
        str, typer.Argument(help="Name in benchmarks/scenarios, or path of a scenario file.")
    ],
    policy: Annotated[
        PolicyName,
        typer.Option(help="Whose ratios: planner, or guarantee (it chooses v itself)."),
    ] = PolicyName.PLANNER,
    v: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Price of a freed worker-second; else the file's."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Batches, seeds 0, 1, ...")] = 5,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the comparison to this file.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write who was on which slot, when, to this folder: chunk above ours."),
    ] = None,
) -> None:
    """Compare a policy with every baseline in virtual time. Nothing here is measured."""
    chosen = load_scenario(scenario)
    terms = Terms(v=chosen.v if v is None else v)
    entrant = Entrant(policy)
    rival = Entrant.ORACLE_GUARANTEE if policy is PolicyName.GUARANTEE else Entrant.ORACLE
    all_seeds = range(seeds)

    def ours(seed: int) -> Task:
        own = terms if entrant in (Entrant.PLANNER, Entrant.GUARANTEE) else Terms()
        return Task(chosen, seed, entrant, own)

    def oracle(seed: int) -> Task:
        return Task(chosen, seed, rival, terms)

    tasks = [*map(ours, all_seeds), *map(oracle, all_seeds)]
    tasks += baseline_tasks(chosen, all_seeds)
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    compared = compare(chosen, all_seeds, terms.v, ours, oracle, run_all(tasks, processes))
    if json_path is not None:
        write_json(compared, json_path)
    _show(compared, policy)
    if timeline is not None:
        chunk = Task(chosen, all_seeds[0], Entrant.CHUNK, Terms())
        _show_timelines(simulate_timelines(chosen, (chunk, ours(all_seeds[0]))), timeline)


def _show(compared: dict[str, Any], policy: PolicyName) -> None:
    table = Table(
        title=f"{compared['scenario']}, {policy}, v = {compared['v']}: simulated, ours / theirs",
        title_justify="left",
    )
    for column in ("against", "throughput", "tokens per occupied worker-second"):
        table.add_column(column)
    for name, ratios in compared["baselines"].items():
        table.add_row(name, *(_text(ratios[f"{f}_ratio"]) for f in ("throughput", "efficiency")))
    bound = compared["bound"]
    for whose, label in (("", "share of the bound"), ("oracle_", "the oracle's share")):
        table.add_row(
            label, *(_text(bound[f"{whose}{f}_share"]) for f in ("throughput", "efficiency"))
        )
    Console().print(table)


def _show_timelines(timelines: Timelines, folder: Path) -> None:
    """Also as files: the numbers, and a picture of them."""
    static, elastic = timelines.rollouts
    write_json(timelines.to_json(), folder / TIMELINE_NAME)
    draw(timelines, folder / PICTURE_NAME)
    console = Console()
    title = f"SIMULATED: {timelines.note}"
    names, figures = (static.name, elastic.name), (static.figures, elastic.figures)
    console.print(compare_figures(title, names, figures))
    table = Table(title=f"Changes of the group, {elastic.name}: simulated", title_justify="left")
    for column in ("at s", "took s", "workers", "reason", "moved", "steps left"):
        table.add_column(column, justify="right")
    for change in elastic.changes:
        table.add_row(
            f"{change.at_s:.0f}",
            f"{change.ended_s - change.at_s:.1f}",
            f"{change.workers_from} -> {change.workers_to}",
            change.reason,
            str(change.moved_samples),
            steps_cell(change.predicted_steps, change.measured_steps),
        )
    console.print(table)
    console.print(f"picture: {folder / PICTURE_NAME}, its numbers: {folder / TIMELINE_NAME}")


def _text(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} - {spread['max']:.2f})"
