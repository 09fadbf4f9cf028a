"""``flexfloor simulate``: one scenario, our rules against every baseline."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.simulation.comparison import Task, baseline_tasks, compare, run_all
from deploy.simulation.scenario import load_scenario
from placement.simulate.contest import Entrant, Terms

MOST_PROCESSES = 8


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
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(compared, indent=1) + "\n")
    _show(compared, policy)


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


def _text(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} - {spread['max']:.2f})"
