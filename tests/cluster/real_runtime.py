"""A runtime whose workers host vLLM: launched once for a file of tests, and asked by them.

Exact mode promises that a sample's tokens and logprobs do not depend on where, beside whom or
how often it decodes. So whatever a test does to the group, it compares with the same batch as a
static rollout decoded it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil

from actors.ray_coordinator_client import CoordinatorClient
from actors.ray_tables import ProcessRow, read_process
from actors.ray_teardown import COORDINATOR_NAME, find_actor, worker_name
from actors.rollout_api import (
    OperationStatus,
    RolloutRequest,
    RolloutState,
    SampleResult,
    Strategy,
)
from actors.settings import RuntimeSettings
from placement.errors import UnavailableError
from placement.ids import RolloutId, WorkerId
from placement.samples import Sampling

T = TypeVar("T")

NUM_WORKERS = 4
MAX_SAMPLES = 8
MAX_MODEL_LEN = 1024
POLL_S = 0.05
ROLLOUT_BOUND_S = 90.0
REGROWTH_BOUND_S = 150.0
"""Three engines are built at once on the cores that also decode."""

BATCH = (24, 30, 16, 20, 28, 36, 18, 22, 26, 32, 40, 34, 20, 24, 200, 240)
"""Lengths of one batch: a long tail of two."""


def settings(namespace: str, model: str, **group: Any) -> RuntimeSettings:
    return RuntimeSettings.model_validate(
        {
            "model": {"path": model, "max_model_len": MAX_MODEL_LEN, "exact": True},
            "group": {
                "max_workers": NUM_WORKERS,
                "max_samples_per_worker": MAX_SAMPLES,
                "kv_memory_bytes": 16 << 20,
                **group,
            },
            # The workers share the cores, and the responses are short.
            "planning": {"unit": "steps", "replan_steps": 4},
            "namespace": namespace,
        }
    )


def batch(
    name: str,
    lengths: tuple[int, ...] = BATCH,
    strategy: Strategy = Strategy.ELASTIC,
    seed: int = 7,
) -> RolloutRequest:
    """One sample per prompt: greedy, drawn, and drawn from a truncated distribution in turn."""
    samplings = tuple(
        (
            Sampling(max_tokens=length, temperature=0.0, ignore_eos=True),
            Sampling(max_tokens=length, temperature=1.0, ignore_eos=True),
            Sampling(max_tokens=length, temperature=0.7, top_p=0.9, top_k=50, ignore_eos=True),
        )[i % 3]
        for i, length in enumerate(lengths)
    )
    prompts = tuple(
        tuple((seed + 13 * i + 5 * j) % 250 + 1 for j in range(4 + i)) for i in range(len(lengths))
    )
    return RolloutRequest(RolloutId(name), prompts, 1, samplings, seed, strategy)


async def until(condition: Callable[[], Awaitable[T | None]], bound_s: float, what: str) -> T:
    """The first true answer of ``condition``."""
    deadline_s = time.monotonic() + bound_s
    while not (answer := await condition()):
        assert time.monotonic() < deadline_s, f"not within {bound_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return answer


def assert_same(results: list[SampleResult], reference: list[SampleResult]) -> None:
    """Tokens and logprobs, bit for bit."""
    assert [r.prompt_index for r in results] == [r.prompt_index for r in reference]
    for result, expected in zip(results, reference, strict=True):
        assert result.finish_reason == expected.finish_reason, result.error
        assert result.token_ids == expected.token_ids, result.sample_id
        assert result.logprobs == expected.logprobs, result.sample_id


class RealRuntime:
    """Args:
    address: of the Ray cluster, for other jobs.
    """

    def __init__(self, client: CoordinatorClient, namespace: str, address: str) -> None:
        self.client = client
        self.namespace = namespace
        self.address = address

    async def results(self, name: str, bound_s: float = ROLLOUT_BOUND_S) -> list[SampleResult]:
        """All samples of a rollout, in the order of its prompts, once it has ended."""
        samples: list[SampleResult] = []
        cursor, done = 0, False
        async with asyncio.timeout(bound_s):
            while not done:
                answer = await self.client.results(RolloutId(name), cursor, 2.0, 100)
                samples += answer.samples
                cursor, done = answer.cursor, answer.done
        return sorted(samples, key=lambda sample: sample.prompt_index)

    async def decode(self, request: RolloutRequest) -> list[SampleResult]:
        await self.client.submit(request)
        return await self.results(request.rollout_id)

    async def decoding(self, name: str, min_tokens: int) -> None:
        """The rollout runs, and has so many tokens altogether."""

        async def so_far() -> bool:
            status = await self.client.status(RolloutId(name))
            assert status.state is RolloutState.RUNNING, "it has ended already"
            return status.response_tokens >= min_tokens

        await until(so_far, ROLLOUT_BOUND_S, f"{min_tokens} tokens of {name}")

    async def whole(self) -> None:
        """All workers are members, and no change is under way."""

        async def is_whole() -> bool:
            members = [w for w in await self.client.workers() if w.rank is not None]
            return len(members) == NUM_WORKERS and await self.change() is None

        await until(is_whole, REGROWTH_BOUND_S, f"a group of {NUM_WORKERS}")

    async def change(self) -> OperationStatus | None:
        """The change that is under way."""
        last = (await self.client.operations())[-1:]
        return last[0] if last and last[0].ended_at is None else None

    async def growth(self) -> OperationStatus:
        """A growth that has just begun."""

        async def growing() -> OperationStatus | None:
            change = await self.change()
            return change if change and len(change.new_members) > len(change.old_members) else None

        return await until(growing, ROLLOUT_BOUND_S, "a change that makes the group wider")

    async def ended(self, change: OperationStatus) -> OperationStatus:
        async def has_ended() -> OperationStatus | None:
            operations = await self.client.operations()
            (same,) = (o for o in operations if o.generation == change.generation)
            return same if same.ended_at is not None else None

        return await until(has_ended, REGROWTH_BOUND_S, f"the end of {change}")

    async def member_pids(self) -> list[int]:
        members = [w for w in await self.client.workers() if w.rank is not None]
        return [w.pid for w in sorted(members, key=lambda w: w.rank or 0)]

    def process(self, name: str) -> ProcessRow | None:
        """The process of one of our actors, as soon as it has one."""
        handle = find_actor(name, self.namespace)
        return read_process(handle) if handle is not None else None

    async def joiner_pid(self, worker_id: WorkerId) -> int:
        """Of a worker that need not be built yet."""

        async def pid() -> int | None:
            row = self.process(worker_name(worker_id))
            return row.pid if row is not None else None

        return await until(pid, ROLLOUT_BOUND_S, f"a process of worker {worker_id}")

    async def kill_coordinator(self) -> float:
        """SIGKILL; returns after how many seconds its successor answers."""
        row = self.process(COORDINATOR_NAME)
        assert row is not None
        kill(row.pid)
        killed_s = time.monotonic()

        async def answers() -> bool:
            try:
                await self.client.workers()
            except UnavailableError:
                return False
            return True

        await until(answers, ROLLOUT_BOUND_S, "a coordinator that answers")
        return time.monotonic() - killed_s


def kill(pid: int) -> None:
    """SIGKILL, and until it has gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([process], timeout=10)
