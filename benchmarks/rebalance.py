"""Whether evening the load out pays on this machine, and what a move costs: the demo's batch on
real workers, with and without moves between workers that stay.

    python -m benchmarks.rebalance OUT.json

Nobody leaves, so that nothing else differs. "planned" moves where the measured time of a step says
that it pays; the planner counts seconds for that, since no move can pay where it counts steps.
"eager" moves whenever the context is uneven at all. Steps do not depend on how busy the machine is,
seconds do: where workers share cores they are no measure, and are left out.
"""

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from actors.rollout_api import SampleResult, Strategy
from benchmarks.provenance import provenance
from benchmarks.spread import spread
from deploy.demo.command import RAY_ENVIRONMENT
from deploy.demo.plan import NUM_SLOTS
from deploy.report.written import write_json

REPEATS = 3
"""While the first one runs, "planned" does not know yet what a step costs."""
LIMIT_S = 400.0
REBALANCE_STEPS = 16
"""Of responses of at most 512 tokens; the default stands for ones fifty times as long."""
EAGER = "tests.cluster.eager_coordinator:EagerCoordinator"


@dataclass(frozen=True, slots=True)
class Way:
    coordinator: str = "actors.coordinator:Coordinator"
    rebalance: bool = True
    move_samples_by: str = "auto"


WAYS = {
    "without": Way(rebalance=False),
    "planned": Way(),
    "eager, copied": Way(EAGER, move_samples_by="copy"),
    "eager, recomputed": Way(EAGER, move_samples_by="recompute"),
}

Answers = dict[tuple[int, int], SampleResult]


async def _rollouts(url: str, workload: Any) -> list[tuple[int, Answers]]:
    """Steps and answers of each repeat."""
    from deploy.demo.replay import RolloutClient  # noqa: PLC0415 - see ``measure``

    found = []
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http:
        client = RolloutClient(http)
        for repeat in range(REPEATS):
            await client.wait_for_workers(NUM_SLOTS, LIMIT_S, lambda _: None)
            body = workload.body(f"repeat-{repeat}", Strategy.ELASTIC)
            replay = await client.replay(body, LIMIT_S, lambda _: None)
            results = (arrived.result for arrived in replay.samples)
            answers = {(r.prompt_index, r.sample_index): r for r in results}
            found.append((replay.status.usage.steps, answers))
    return found


def _same(ones: Answers, others: Answers) -> bool:
    """Tokens and logprobs, bit for bit."""
    return ones.keys() == others.keys() and all(
        (a.token_ids, a.logprobs) == (others[key].token_ids, others[key].logprobs)
        for key, a in ones.items()
    )


def measure(out_dir: Path) -> dict[str, Any]:
    from deploy.demo.preparation import configure, prepare  # noqa: PLC0415 - Ray reads its
    from deploy.demo.stage import set_stage  # noqa: PLC0415 - environment at import

    made_of = provenance()  # refuses before anything is measured
    prepared = prepare(out_dir, short=False)
    rollouts = {}
    for name, way in WAYS.items():
        config = configure(
            prepared, unit="seconds", rebalance=way.rebalance, rebalance_steps=REBALANCE_STEPS
        )
        group = {"min_workers": NUM_SLOTS, "move_samples_by": way.move_samples_by}
        config = config.model_copy(update={"group": config.group.model_copy(update=group)})
        with set_stage(config, print, way.coordinator) as stage:
            rollouts[name] = asyncio.run(_rollouts(stage.url, prepared.workload))
    (_, reference), *_ = rollouts["without"]
    return {
        **made_of,
        "repeats": REPEATS,
        "samples": prepared.workload.num_samples,
        "ways": {
            name: {
                "steps": spread([steps for steps, _ in found]),
                "moves": spread([sum(len(r.worker_ids) - 1 for r in a.values()) for _, a in found]),
                "same_tokens_and_logprobs": all(_same(reference, answers) for _, answers in found),
            }
            for name, found in rollouts.items()
        },
    }


def main() -> None:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        write_json(measure(Path(folder)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
