"""Whether evening the load out pays on this machine: the demo's batch on real workers, with and
without moves between workers that stay.

    python -m benchmarks.rebalance OUT.json

Nobody leaves, so that nothing else differs, and the planner counts seconds: where it counts steps,
no move can pay. Each way gets a service of its own; ratios are of medians within this run.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from actors.rollout_api import Strategy
from benchmarks.provenance import provenance
from benchmarks.spread import spread
from deploy.demo.command import RAY_ENVIRONMENT
from deploy.demo.plan import NUM_SLOTS
from deploy.report.written import write_json

REPEATS = 4
"""The first of each is left out: while it runs, the time of a step is not known yet."""
LIMIT_S = 300.0
REBALANCE_STEPS = 16
"""Of responses of at most 512 tokens; the default stands for ones fifty times as long."""


async def _rollouts(url: str, workload: Any) -> list[dict[str, Any]]:
    from deploy.demo.replay import RolloutClient  # noqa: PLC0415 - see ``measure``

    figures = []
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as http:
        client = RolloutClient(http)
        for repeat in range(REPEATS):
            await client.wait_for_workers(NUM_SLOTS, LIMIT_S, lambda _: None)
            body = workload.body(f"repeat-{repeat}", Strategy.ELASTIC)
            replay = await client.replay(body, LIMIT_S, lambda _: None)
            usage = replay.status.usage
            figures.append(
                {
                    "makespan_s": usage.span_s,
                    "steps": usage.steps,
                    "moved_samples": replay.status.num_moved,
                }
            )
    return figures


def measure(out_dir: Path) -> dict[str, Any]:
    from deploy.demo.preparation import configure, prepare  # noqa: PLC0415 - Ray reads its
    from deploy.demo.stage import set_stage  # noqa: PLC0415 - environment at import

    made_of = provenance()  # refuses before anything is measured
    prepared = prepare(out_dir, short=False)
    found = {}
    for name, rebalance in (("without", False), ("with", True)):
        config = configure(
            prepared, unit="seconds", rebalance=rebalance, rebalance_steps=REBALANCE_STEPS
        )
        group = config.group.model_copy(
            update={"min_workers": NUM_SLOTS, "move_samples_by": "auto"}
        )
        with set_stage(config.model_copy(update={"group": group}), print) as stage:
            repeats = asyncio.run(_rollouts(stage.url, prepared.workload))[1:]
        found[name] = {key: spread([r[key] for r in repeats]) for key in repeats[0]}
    ratios = {
        f"{key}_ratio": found["with"][key]["median"] / found["without"][key]["median"]
        for key in ("makespan_s", "steps")
    }
    return {**made_of, "repeats": REPEATS - 1, **found, **ratios}


def main() -> None:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        write_json(measure(Path(folder)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
