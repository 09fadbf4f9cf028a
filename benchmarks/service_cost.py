"""What serving costs beside decoding: one worker, one batch, asked in every way in turns.

    python -m benchmarks.service_cost OUT.json

The same batch is decoded by one engine driven directly, by the coordinator driven directly, and
over HTTP in the native and the OpenAI dialect, whole and streamed; rounds are interleaved, so that
a machine that is busy with something else is busy with all of them. CPU seconds are read per
process: everything but the worker is what serving costs. The engine that is driven directly also
says how its step divides into vLLM's forward, the rest of vLLM, and what is ours.

On a machine with few cores all processes compete with the worker, so a way's tokens per second
fall by what the others compute, and by whatever else the machine does; CPU seconds do not.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from actors.ray_coordinator import launch, shutdown_runtime
from actors.ray_coordinator_client import CoordinatorClient
from actors.rollout_api import RolloutRequest
from benchmarks.engine_alone import EngineAlone
from benchmarks.process_cpu import cpu_by_part
from benchmarks.provenance import ROOT, provenance
from benchmarks.spread import spread
from deploy import application
from deploy.cluster import ray_cluster
from deploy.config import FlexFloorConfig, check_tree
from deploy.make_model import make_model
from placement.ids import RolloutId
from placement.samples import Sampling

NUM_SAMPLES = 64
PROMPT_TOKENS = 32
RESPONSE_TOKENS = 128
ROUNDS = 3
LIMIT_S = 120.0
NAMESPACE = "service-cost"
PORT = 8731
PROMPTS = [[1 + (7 * n + j) % 250 for j in range(PROMPT_TOKENS)] for n in range(NUM_SAMPLES)]
SAMPLING = {"max_tokens": RESPONSE_TOKENS, "temperature": 1.0, "ignore_eos": True}

Way = Callable[[str], Awaitable[int]]
"""Decodes the batch under an id and returns its tokens."""


class Ways:
    """The batch, asked for in every way."""

    def __init__(self, coordinator: CoordinatorClient, http: httpx.AsyncClient) -> None:
        self._coordinator = coordinator
        self._http = http

    def all(self) -> dict[str, Way]:
        return {
            "coordinator": self.coordinator,
            "native": self.native,
            "native_samples": self.native_samples,
            "native_tokens": self.native_tokens,
            "openai": self.openai,
            "openai_stream": self.openai_stream,
        }

    async def coordinator(self, name: str) -> int:
        request = RolloutRequest(
            RolloutId(name),
            tuple(tuple(prompt) for prompt in PROMPTS),
            1,
            (Sampling(RESPONSE_TOKENS, ignore_eos=True),),
            seed=1,
        )
        await self._coordinator.submit(request)
        tokens, cursor, done = 0, 0, False
        while not done:
            batch = await self._coordinator.results(request.rollout_id, cursor, 2.0, NUM_SAMPLES)
            tokens += sum(len(sample.token_ids) for sample in batch.samples)
            cursor, done = batch.cursor, batch.done
        return tokens

    async def native(self, name: str) -> int:
        answer = await self._http.post("/v1/rollouts", json=self._native(name, stream=False))
        return sum(len(sample["token_ids"]) for sample in answer.json()["samples"])

    async def native_samples(self, name: str) -> int:
        return await self._native_lines(name, "samples")

    async def native_tokens(self, name: str) -> int:
        return await self._native_lines(name, "tokens")

    async def _native_lines(self, name: str, stream: str) -> int:
        tokens = 0
        body = self._native(name, stream=stream)
        async with self._http.stream("POST", "/v1/rollouts", json=body) as lines:
            async for line in lines.aiter_lines():
                told = json.loads(line)
                samples = [told] if told["type"] == "sample" else told.get("samples", [])
                tokens += sum(len(sample["token_ids"]) for sample in samples)
        return tokens

    def _native(self, name: str, *, stream: bool | str) -> dict[str, Any]:
        sampling = SAMPLING
        return {"id": name, "prompts": PROMPTS, "sampling": sampling, "seed": 1, "stream": stream}

    async def openai(self, name: str) -> int:
        """A request per sample, all at once: what a trainer's client does."""

        async def one(number: int) -> int:
            body = self._openai(name, number)
            answer = (await self._http.post("/v1/completions", json=body)).json()
            return int(answer["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*(one(number) for number in range(NUM_SAMPLES))))

    async def openai_stream(self, name: str) -> int:
        async def one(number: int) -> int:
            tokens = 0
            body = self._openai(name, number) | {"stream": True}
            async with self._http.stream("POST", "/v1/completions", json=body) as lines:
                async for line in lines.aiter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            tokens += len(choice["token_ids"])
            return tokens

        return sum(await asyncio.gather(*(one(number) for number in range(NUM_SAMPLES))))

    def _openai(self, name: str, number: int) -> dict[str, Any]:
        asked = {"prompt": PROMPTS[number], "seed": number, "logprobs": 0, "return_token_ids": True}
        return asked | SAMPLING | {"request_id": f"{name}-{number}"}


async def measure(config: FlexFloorConfig, client: CoordinatorClient, url: str) -> dict[str, Any]:
    (worker,) = await client.workers()
    engine = EngineAlone(config.model.path, config.group.kv_memory_bytes, PROMPTS, RESPONSE_TOKENS)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[dict[str, float]]] = {}
    steps: list[dict[str, float]] = []
    expected = NUM_SAMPLES * RESPONSE_TOKENS
    limits = httpx.Limits(max_connections=None)
    with engine:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as http:
            ways = Ways(client, http).all()
            for number in range(ROUNDS + 1):  # the first round warms up
                alone = await asyncio.to_thread(engine.decode)
                if number:
                    seconds.setdefault("engine", []).append(alone.pop("seconds"))
                    cpu.setdefault("engine", []).append({"worker": alone.pop("cpu_s")})
                    steps.append(alone)
                for way, decode in ways.items():
                    before, began = cpu_by_part(worker.pid), perf_counter()
                    tokens = await decode(f"{way}-{number}")
                    took_s = perf_counter() - began
                    after = cpu_by_part(worker.pid)
                    assert tokens == expected, (way, tokens, expected)
                    if number:
                        seconds.setdefault(way, []).append(took_s)
                        spent = {part: after[part] - before.get(part, 0.0) for part in after}
                        cpu.setdefault(way, []).append(spent)
                print(number, {way: round(values[-1], 2) for way, values in seconds.items()})
    return {
        "tokens_per_s": {w: spread([expected / s for s in took]) for w, took in seconds.items()},
        "ratio_to_engine": {
            way: statistics.median(
                alone / took for alone, took in zip(seconds["engine"], values, strict=True)
            )
            for way, values in seconds.items()
        },
        "cpu_s_per_1000_tokens": {
            way: {
                part: statistics.median(1000 * one.get(part, 0.0) / expected for one in spent)
                for part in sorted({part for one in spent for part in one})
            }
            for way, spent in cpu.items()
        },
        "engine_step_cpu_ms": {part: spread([one[part] for one in steps]) for part in steps[0]},
    }


def main(out: Path) -> None:
    result: dict[str, Any] = {
        **provenance(),
        "command": "python -m benchmarks.service_cost",
        "batch": {
            "samples": NUM_SAMPLES,
            "prompt_tokens": PROMPT_TOKENS,
            "response_tokens": RESPONSE_TOKENS,
        },
        "rounds": ROUNDS,
    }
    os.environ["PYTHONPATH"] = str(ROOT)
    # Ray makes workers nicer than all else on a machine; the engine alone is not.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name, as Ray reads it
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory(prefix="ff", ignore_cleanup_errors=True) as directory:
        model = make_model(Path(directory) / "model")
        config, errors = check_tree(
            {
                "model": {"path": str(model), "max_model_len": 512},
                "group": {"max_workers": 1, "max_samples_per_worker": NUM_SAMPLES},
                "lease": {"resources": {"CPU": 1}},
                "service": {"port": PORT},
                "namespace": NAMESPACE,
            }
        )
        assert config is not None, errors
        with ray_cluster(None, NAMESPACE, config.lease.resources, 1, print):
            client = launch(config.runtime, say=print)
            try:
                url = application.run(config)
                result |= asyncio.run(measure(config, client, url))
            finally:
                application.stop()
                shutdown_runtime(NAMESPACE, say=print)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
