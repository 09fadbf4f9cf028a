"""What a move costs the sample that moves: measured on real engines over Ray.

    python -m benchmarks.move_cost OUT.json

Two workers decode in lockstep, eight samples beside the one that moves. A sample with so much
context is taken from one worker and given to the other, with its KV and without, in turns; the
time ends when its next token is there. With its KV, the fetch is part of it, and its bytes go
through Ray's object store of one machine: no network is in these numbers. What a recomputed
context costs all the others, whose step it lengthens, is in the steps' seconds.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from actors.member import Member
from actors.protocol import Evicted, Tokens, WorkerSpec
from actors.ray_leases import RayLeases
from actors.ray_teardown import end_workers_and_leases
from actors.ray_worker_port import RayWorker, RayWorkerFactory
from actors.sample_kv import SampleKv
from actors.settings import GroupSettings, LeaseSettings
from benchmarks.provenance import ROOT, provenance
from benchmarks.spread import spread
from deploy.make_model import make_model
from placement.ids import Generation, SampleId, WorkerId
from placement.samples import Sample, Sampling

CONTEXTS_TOKENS = (128, 900)
NEIGHBOURS = 8
REPEATS = 9
KNOWN_TOKENS = 4
"""Generated before the move."""
MAX_MODEL_LEN = 2048
NAMESPACE = "move-cost"


class TakenFrom(Member):
    """A member whose running samples can be taken out with their KV, as from a leaver."""

    def fetch_kv(self, sample_ids: list[SampleId]) -> dict[SampleId, SampleKv]:
        def take() -> dict[SampleId, SampleKv]:
            taken = {}
            for sample_id in sample_ids:
                self._outbox.put(Evicted(sample_id, self._engine.hold(sample_id)))
                kv = self._engine.export_kv(sample_id)
                assert kv is not None
                taken[sample_id] = kv
            return taken

        return self._jobs.do(take)


@dataclass
class Side:
    """A worker, and what it has told."""

    worker: RayWorker
    cursor: int = 0

    async def tokens(self, wait_s: float) -> list[Tokens]:
        """What it has made since it was asked last."""
        report = await self.worker.collect(self.cursor, wait_s)
        self.cursor = report.cursor
        return [event for event in report.events if isinstance(event, Tokens)]


class Bench:
    """``there``: the worker that samples are taken from; ``here``: the one they come to."""

    def __init__(self, there: Side, here: Side) -> None:
        self._there = there
        self._here = here
        self._moves = 0

    async def move(self, context_tokens: int, *, copies: bool) -> dict[str, float]:
        """One move and its parts."""
        self._moves += 1
        long = Sampling(MAX_MODEL_LEN // 2, ignore_eos=True)
        whole = _sample(f"{self._moves}", context_tokens - KNOWN_TOKENS, long)
        neighbours = [_sample(f"{self._moves}/{i}", 32, long) for i in range(NEIGHBOURS)]
        await self._here.worker.submit(neighbours)
        await self._there.worker.submit([whole])
        generated: list[int] = []
        while len(generated) < KNOWN_TOKENS:
            generated += await self._made(self._there, whole.sample_id)
        fetch_start = time.perf_counter()
        kv = await self._there.worker.fetch_kv([whole.sample_id])
        fetch_s = time.perf_counter() - fetch_start
        generated += await self._made(self._there, whole.sample_id, wait_s=0.0)
        # The next token is the last one, and so is told at once.
        last = replace(whole, sampling=Sampling(len(generated) + 1, ignore_eos=True))
        moved = last.continued(tuple(generated))
        submitted = time.perf_counter()
        await self._here.worker.submit([moved], kv if copies else None)
        while not await self._made(self._here, moved.sample_id):
            assert time.perf_counter() - submitted < 30, "the next token never came"
        next_token_s = time.perf_counter() - submitted
        await self._here.worker.cancel([neighbour.sample_id for neighbour in neighbours])
        return {
            "next_token_ms": 1000 * (next_token_s + (fetch_s if copies else 0.0)),
            "fetch_ms": 1000 * fetch_s,
            "kv_bytes": kv.num_bytes,
        }

    async def _made(self, side: Side, sample_id: SampleId, wait_s: float = 1.0) -> list[int]:
        made = await side.tokens(wait_s)
        return [t for tokens in made if tokens.sample_id == sample_id for t in tokens.token_ids]

    async def measure(self, context_tokens: int) -> dict[str, Any]:
        for copies in (True, False):  # first use of a kernel is slow
            await self.move(context_tokens, copies=copies)
        copied, recomputed = [], []
        for _ in range(REPEATS):
            copied.append(await self.move(context_tokens, copies=True))
            recomputed.append(await self.move(context_tokens, copies=False))
        copied_ms = spread([move["next_token_ms"] for move in copied])
        recomputed_ms = spread([move["next_token_ms"] for move in recomputed])
        return {
            "copied_ms": copied_ms,
            "of_these_fetch_ms": spread([move["fetch_ms"] for move in copied]),
            "recomputed_ms": recomputed_ms,
            "ratio_of_medians": copied_ms["median"] / recomputed_ms["median"],
            "kv_bytes": copied[0]["kv_bytes"],
        }


def _sample(name: str, prompt_tokens: int, sampling: Sampling) -> Sample:
    prompt = tuple(1 + (7 * i) % 250 for i in range(prompt_tokens))
    return Sample(SampleId(name), prompt, sampling, seed=1)


async def _start(model: str, store_port: int) -> list[Side]:
    """Two workers that decode in lockstep."""
    factory = RayWorkerFactory(GroupSettings(), NAMESPACE, "benchmarks.move_cost:TakenFrom")
    leases = await RayLeases(LeaseSettings(), NAMESPACE).acquire(2, 60, print)
    members = tuple(WorkerId(i) for i in range(len(leases)))
    workers = [await factory.spawn(m, lease) for m, lease in zip(members, leases, strict=True)]
    specs = [
        WorkerSpec(
            worker_id=member,
            members=members,
            generation=Generation(0),
            joiner=False,
            store_address=("127.0.0.1", store_port),
            model=model,
            engine_args={"max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16"},
            kv_memory_bytes=64 << 20,
            exact=True,
            max_samples=NEIGHBOURS + 1,
        )
        for member in members
    ]
    await asyncio.gather(*(w.build(spec) for w, spec in zip(workers, specs, strict=True)))
    await asyncio.gather(*(worker.start() for worker in workers))
    return [Side(worker) for worker in workers]


async def _run(model: str) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bench = Bench(*await _start(model, store.port))
    found = {}
    for context_tokens in CONTEXTS_TOKENS:
        found[f"context_{context_tokens}"] = await bench.measure(context_tokens)
        print(context_tokens, found[f"context_{context_tokens}"], flush=True)
    return found


def main(out: Path) -> None:
    result: dict[str, Any] = {**provenance(), "repeats": REPEATS, "neighbours": NEIGHBOURS}
    os.environ["PYTHONPATH"] = str(ROOT)
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ff", ignore_cleanup_errors=True) as directory:
        model = str(make_model(Path(directory) / "model"))
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,  # logical ones: Ray schedules them, nothing is there
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=directory,
        )
        try:
            result |= asyncio.run(_run(model))
        finally:
            end_workers_and_leases(NAMESPACE, timeout_s=30)
            ray.shutdown()
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
