"""What a move costs the sample that moves: measured on real engines, ratios within one run.

    python -m benchmarks.move_cost OUT.json

Two workers decode in lockstep. A sample with so much context is taken from one and given to the
other, with its KV and without, in turns; the time ends when its next token is there. The workers
are processes on one machine and speak through pipes: a cluster's network and object store are
not in these numbers.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.member import Member
from actors.sample_kv import SampleKv
from benchmarks.provenance import ROOT, provenance
from deploy.make_model import make_model
from placement.ids import SampleId
from placement.samples import Sample, Sampling
from tests.engine.local_group import LocalGroup, Response

CONTEXTS_TOKENS = (128, 900)
NEIGHBOURS = 8
"""Samples that decode beside it on the worker that it comes to."""
REPEATS = 9
KNOWN_TOKENS = 4
"""Generated before the move."""
MAX_MODEL_LEN = 2048


def take_out(member: Member, sample_id: SampleId) -> SampleKv | None:
    """In the worker: let a running sample go, as a leaver does, and hand out its KV."""

    def let_go() -> SampleKv | None:
        member._engine.hold(sample_id)
        return member._engine.export_kv(sample_id)

    kv: SampleKv | None = member._jobs.do(let_go)
    return kv


def _sample(name: str, prompt_tokens: int, max_tokens: int) -> Sample:
    prompt = tuple(1 + (7 * i) % 250 for i in range(prompt_tokens))
    return Sample(SampleId(name), prompt, Sampling(max_tokens, ignore_eos=True), seed=1)


class Bench:
    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self._there, self._here = group.members
        self._moves = 0

    def move(self, context_tokens: int, *, copies: bool) -> dict[str, float]:
        """Milliseconds of one move and of its parts."""
        group, here = self._group, self._here
        self._moves += 1
        whole = _sample(f"{self._moves}", context_tokens - KNOWN_TOKENS, MAX_MODEL_LEN // 2)
        for i in range(NEIGHBOURS):
            neighbour = _sample(f"{self._moves}/{i}", 32, MAX_MODEL_LEN // 2)
            group.submit(here, neighbour)
        group.submit(self._there, whole)
        group.wait_for_tokens(whole.sample_id, KNOWN_TOKENS)
        start = time.perf_counter()
        kv = group.workers[self._there].do(take_out, whole.sample_id)
        taken = time.perf_counter()
        assert kv is not None
        group.collect(self._there)
        generated = tuple(group.responses[whole.sample_id].token_ids)
        # The next token is the last one, and so is told at once.
        last = replace(whole, sampling=Sampling(len(generated) + 1, ignore_eos=True))
        moved = replace(last.continued(generated), sample_id=SampleId(f"{whole.sample_id} moved"))
        submitted = time.perf_counter()
        group.responses[moved.sample_id] = Response(moved, token_ids=list(generated))
        group.submit(here, moved, kv={moved.sample_id: kv} if copies else None)
        while group.responses[moved.sample_id].finish is None:
            group.collect(here, wait_s=1.0)
        end = time.perf_counter()
        group.cancel_all()
        return {
            "next_token_ms": 1000 * (end - submitted + (taken - start if copies else 0.0)),
            "take_out_ms": 1000 * (taken - start) if copies else 0.0,
            "kv_bytes": float(kv.num_bytes) if copies else 0.0,
        }


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def measure(bench: Bench, context_tokens: int) -> dict[str, Any]:
    bench.move(context_tokens, copies=True)  # first use of a kernel is slow
    bench.move(context_tokens, copies=False)
    copied, recomputed = [], []
    for _ in range(REPEATS):
        copied.append(bench.move(context_tokens, copies=True))
        recomputed.append(bench.move(context_tokens, copies=False))
    copy_ms = _spread([move["next_token_ms"] for move in copied])
    recompute_ms = _spread([move["next_token_ms"] for move in recomputed])
    return {
        "copied_ms": copy_ms,
        "of_these_take_out_ms": _spread([move["take_out_ms"] for move in copied]),
        "recomputed_ms": recompute_ms,
        "ratio_of_medians": copy_ms["median"] / recompute_ms["median"],
        "kv_bytes": copied[0]["kv_bytes"],
    }


def main(out: Path) -> None:
    result: dict[str, Any] = {**provenance(), "repeats": REPEATS, "neighbours": NEIGHBOURS}
    os.environ["PYTHONPATH"] = str(ROOT)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory)))
        engine_args = {"max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16"}
        group = LocalGroup(model, 2, engine_args=engine_args)
        try:
            bench = Bench(group)
            for context_tokens in CONTEXTS_TOKENS:
                found = measure(bench, context_tokens)
                result[f"context_{context_tokens}"] = found
                print(context_tokens, found, flush=True)
        finally:
            group.close()
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
