"""A small simulated cluster and small batches for it."""

import numpy as np

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.simulate.cluster import SimulatedCluster
from placement.simulate.workload import Workload, resample, synthetic_prompts

EXPERTS = 16


def cluster(num_workers: int = 4, kv_tokens: int = 20_000, max_samples: int = 64):
    """An expert beyond the fair share costs 250 tokens of KV."""
    fair = -(-EXPERTS // num_workers)
    table = [0] + [
        max(0, kv_tokens - 250 * (-(-EXPERTS // width) - fair))
        for width in range(1, num_workers + 1)
    ]
    return SimulatedCluster(
        num_workers=num_workers,
        max_samples=max_samples,
        kv_tokens_at_width=tuple(table),
        kv_block_tokens=16,
        kv_token_bytes=1000,
        num_experts=EXPERTS,
        expert_bytes=10**6,
        step_time=StepTimeModel(0.01, 0.02, 1e-6, 1e-4, 1e-5, routed_ratio=0.25),
        prefill_token_s=1e-5,
        reconfiguration=ReconfigurationCost(0.5, 1e9, 1e9),
    )


def workload(num_samples: int = 64, seed: int = 0, limit: int = 4000, median: float = 300.0):
    prompts = synthetic_prompts(16, 4, seed, median_tokens=median, prompt_tokens=50)
    return resample(prompts, num_samples, 4, limit, seed)


def batch_of(lengths: list[int], limit: int = 4000) -> Workload:
    """Every sample a prompt of its own of 10 tokens, nothing known of it."""
    count = len(lengths)
    return Workload(
        np.full(count, 10, np.int64), np.array(lengths), np.arange(count), limit, history={}
    )
