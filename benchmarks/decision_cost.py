"""How long deciding takes, by the number of samples and workers: CPU time on this machine,
which other programs on it disturb less than they do the clock.
"""

import time
from typing import Any

import numpy as np

from benchmarks.spread import spread
from placement.cost import ReconfigurationCost, StepTimeModel
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.horizon import GroupCosts
from placement.ids import SampleId, WorkerId
from placement.planner import PlannerSettings, ReleasePlanner
from placement.release import IdlePolicy
from placement.views import GroupView, LengthBelief, SampleView, WorkerView

SIZES = (
    (1_000, 8),
    (1_000, 64),
    (10_000, 8),
    (10_000, 64),
    (10_000, 1_024),
    (100_000, 64),
    (100_000, 1_024),
)
REPEATS = 5
LIMIT_TOKENS = 32_768


def measure_decisions() -> list[dict[str, Any]]:
    return [_measure(num_samples, num_workers) for num_samples, num_workers in SIZES]


def _measure(num_samples: int, num_workers: int) -> dict[str, Any]:
    """A release decision over so many running samples, and binding as many queued ones."""
    costs = GroupCosts(
        StepTimeModel(0.005, 0.02, 4e-8, 1.3e-5, 7e-6, routed_ratio=1 / 16),
        ReconfigurationCost(2.0, 3.5e10, 3.5e10),
        num_experts=max(128, num_workers),
        expert_bytes=450_000_000,
        kv_token_bytes=98_304,
        recompute_token_s=1.3e-5,
    )
    running = _view(num_samples, num_workers, running=True)
    queued = _view(num_samples, num_workers, running=False)
    release_s, dispatch_s = [], []
    for _ in range(REPEATS):
        planner = ReleasePlanner(PlannerSettings(price=0.5), costs)
        started = time.process_time()
        decision = planner(running, IdlePolicy.ALL)
        release_s.append(time.process_time() - started)
        if decision.predicted is None:
            raise SystemExit(f"nothing was planned, so nothing is measured: {decision.explanation}")
        dispatcher = Dispatcher(DispatchSettings(), costs)
        started = time.process_time()
        dispatcher(queued)
        dispatch_s.append(time.process_time() - started)
    return {
        "samples": num_samples,
        "workers": num_workers,
        "release_decision_ms": spread([1e3 * s for s in release_s]),
        "dispatch_us_per_sample": spread([1e6 * s / num_samples for s in dispatch_s]),
    }


def _view(num_samples: int, num_workers: int, *, running: bool) -> GroupView:
    rng = np.random.default_rng(0)
    mu = np.log(3000) + 0.9 * rng.standard_normal(num_samples)
    length = np.exp(mu + 0.3 * rng.standard_normal(num_samples))
    generated = (
        (length * rng.uniform(0, 1, num_samples)).astype(int) if running else [0] * num_samples
    )
    samples = tuple(
        SampleView(
            sample_id=SampleId(f"s/{i}/0"),
            context_tokens=200 + int(tokens),
            max_context_tokens=200 + LIMIT_TOKENS,
            order=i,
            worker_id=WorkerId(i % num_workers) if running else None,
            generated_tokens=int(tokens),
            prompt_key=f"p{i // 8}",
            belief=LengthBelief(float(mu[i]), 0.3),
        )
        for i, tokens in enumerate(generated)
    )
    # Room for half of the samples at their mean length, more when fewer experts are held.
    kv_tokens = max(2 * LIMIT_TOKENS, num_samples // num_workers * 2500)
    table = tuple(0 if width < 2 else kv_tokens for width in range(num_workers + 1))
    most = max(256, 2 * num_samples // num_workers)
    return GroupView(
        workers=tuple(WorkerView(WorkerId(w), most, kv_tokens) for w in range(num_workers)),
        running=samples if running else (),
        queued=() if running else samples,
        num_experts=max(128, num_workers),
        kv_tokens_at_width=table,
        max_workers=num_workers,
        floor_workers=2,
        any_finished=running,
        kv_block_tokens=16,
        steps=10_000,
        num_ended=num_samples if running else 0,
    )
