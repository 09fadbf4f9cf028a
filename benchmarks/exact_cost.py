"""What exact mode costs a decode step: measured on real engines, ratios within one run.

    python -m benchmarks.exact_cost OUT.json

For 1, 2 and 4 workers, a group in exact mode and one with the stock combine decode the same
load in turns. On a machine where the workers share cores, a step's seconds hold the waiting
for each other too; the ratio is what carries over, and only to machines like this one.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from actors.engines.sampling_noise import draw, noise_key
from benchmarks.provenance import ROOT, provenance
from benchmarks.spread import spread
from deploy.make_model import make_model
from placement.ids import SampleId
from placement.samples import Sample, Sampling
from tests.engine.local_group import LocalGroup

SAMPLES_PER_WORKER = 16
STEPS = 48
REPEATS = 5
SKIPPED_STEPS = 8
"""The first steps hold prefills."""


def step_s(model: str, size: int, *, exact: bool) -> list[float]:
    """Median seconds of a decode step, one value per repeat."""
    group = LocalGroup(model, size, exact=exact)
    try:
        return [_one_repeat(group, repeat) for repeat in range(REPEATS)]
    finally:
        group.close()


def _one_repeat(group: LocalGroup, repeat: int) -> float:
    sampling = Sampling(max_tokens=STEPS, temperature=1.0, ignore_eos=True)
    for worker in group.members:
        prompts = [
            Sample(
                SampleId(f"{repeat}/{worker}/{i}"),
                tuple(1 + (i * 7 + j) % 250 for j in range(32)),
                sampling,
                seed=i,
            )
            for i in range(SAMPLES_PER_WORKER)
        ]
        group.submit(worker, *prompts)
    group.finish_all()
    first = group.workers[group.members[0]]
    recent = first.do("collect", first.acknowledged, 0.0).stats.recent_step_s
    return statistics.median(recent[-STEPS + SKIPPED_STEPS :])


def noise_us(rows: int, vocab_size: int) -> dict[str, float]:
    """One draw of ``rows`` tokens: ours, and torch's generator-based exponential noise."""
    logits = torch.randn(rows, vocab_size)
    keys = torch.tensor([noise_key(i, i) for i in range(rows)])

    def stock() -> torch.Tensor:
        noise = torch.empty_like(logits).exponential_()
        return (logits.softmax(-1) / noise).argmax(-1)

    def median_us(function: object) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            function()  # type: ignore[operator]
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    return {"ours": median_us(lambda: draw(logits, keys)), "torch": median_us(stock)}


def main(out: Path) -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    torch.set_num_threads(1)
    result: dict[str, object] = {
        **provenance(),
        "samples_per_worker": SAMPLES_PER_WORKER,
        "repeats": REPEATS,
    }
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory)))
        for size in (1, 2, 4):
            exact, stock = step_s(model, size, exact=True), step_s(model, size, exact=False)
            result[f"workers_{size}"] = {
                "exact_step_ms": spread([1000 * s for s in exact]),
                "stock_step_ms": spread([1000 * s for s in stock]),
                "ratio_of_medians": statistics.median(exact) / statistics.median(stock),
            }
            print(size, result[f"workers_{size}"], flush=True)
    result["draw_us"] = {
        f"16x{vocab}": noise_us(SAMPLES_PER_WORKER, vocab) for vocab in (512, 151_936)
    }
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
