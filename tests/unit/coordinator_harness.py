"""A coordinator among fakes, and the checks that hold at the end of every such test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from actors.coordinator import Coordinator
from actors.journal import Journal
from actors.rollout_api import RolloutRequest, SampleResult, Strategy
from actors.settings import (
    CoordinatorSettings,
    GroupSettings,
    LeaseSettings,
    ModelSettings,
    RuntimeSettings,
)
from placement.ids import RolloutId
from placement.samples import Sampling
from tests.unit.fake_cluster import FakeFactory, FakeLeases, FakeStore, expected_response
from tests.unit.fake_keeper import FakeKeeper
from tests.unit.virtual_time import clock


def make_settings(
    *, max_open_samples: int = 1000, acquire_timeout_s: float = 20, **group: Any
) -> RuntimeSettings:
    return RuntimeSettings(
        model=ModelSettings(path="model", max_model_len=200),
        group=GroupSettings(
            **{
                "max_workers": 4,
                "max_samples_per_worker": 4,
                "kv_memory_bytes": 1 << 20,
                "build_timeout_s": 30,
                "prepare_timeout_s": 5,
                "switch_timeout_s": 5,
                "leave_timeout_s": 5,
                **group,
            }
        ),
        lease=LeaseSettings(acquire_timeout_s=acquire_timeout_s),
        coordinator=CoordinatorSettings(max_open_samples=max_open_samples),
    )


def make_request(
    rollout_id: str,
    lengths: list[int],
    *,
    strategy: Strategy = Strategy.ELASTIC,
    max_tokens: int = 150,
    seed: int = 7,
) -> RolloutRequest:
    """One prompt per length; the responses have exactly these lengths."""
    return RolloutRequest(
        rollout_id=RolloutId(rollout_id),
        prompts=tuple((1, 2, 3 + index % 90) for index in range(len(lengths))),
        num_samples=1,
        samplings=(Sampling(max_tokens=max_tokens),),
        seed=seed,
        strategy=strategy,
        replay_stop_tokens=tuple((length,) for length in lengths),
    )


class World:
    """``slots`` on one node "a" (and more nodes if given)."""

    def __init__(self, slots: int | dict[str, int] = 4) -> None:
        self.leases = FakeLeases(slots if isinstance(slots, dict) else {"a": slots})
        self.factory = FakeFactory(self.leases)
        self.store = FakeStore()
        self.keeper = FakeKeeper()
        self._earlier: set[asyncio.Task[Any]] = set()

    def coordinator(
        self, settings: RuntimeSettings | None = None, journal: Journal | None = None
    ) -> Coordinator:
        self._earlier = asyncio.all_tasks()
        return Coordinator(
            settings or make_settings(),
            self.leases,
            self.factory,
            self.store,
            clock,
            keeper=self.keeper,
            journal=journal,
        )

    async def coordinator_dies(self) -> None:
        """All that its process does ends at once; workers go on."""
        tasks = asyncio.all_tasks() - self._earlier - {self.factory.stepping}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def is_clean(self) -> bool:
        return not self.leases.leases and not self.factory.living()


@asynccontextmanager
async def started(
    world: World, settings: RuntimeSettings | None = None, journal: Journal | None = None
) -> AsyncIterator[Coordinator]:
    coordinator = world.coordinator(settings, journal)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.shutdown()
        await world.factory.stop()
        assert world.is_clean(), "something is still leased or running"


async def all_results(coordinator: Coordinator, rollout_id: str) -> list[SampleResult]:
    """Read a rollout to its end through the cursor; in the order of the request."""
    results: list[SampleResult] = []
    cursor, done = 0, False
    while not done:
        batch = await coordinator.results(RolloutId(rollout_id), cursor, 30.0, 7)
        results += batch.samples
        cursor, done = batch.cursor, batch.done
    return sorted(results, key=lambda result: (result.prompt_index, result.sample_index))


def check_tokens(results: list[SampleResult], lengths: list[int]) -> None:
    """Every response is exactly what its seed says, however often it moved."""
    assert [len(result.token_ids) for result in results] == lengths
    for result in results:
        assert result.token_ids == expected_response(result.seed, 3, len(result.token_ids))
        assert len(result.logprobs) == len(result.token_ids)


async def check_usage_adds_up(coordinator: Coordinator, rollout_id: str) -> None:
    usage = (await coordinator.status(RolloutId(rollout_id))).usage
    parts_s = (
        usage.occupied_worker_s
        + usage.freed_worker_s
        + usage.not_yet_leased_worker_s
        + usage.shared_worker_s
    )
    assert abs(parts_s - usage.peak_slots * usage.span_s) < 1e-6
    assert 0 <= usage.used_worker_s <= usage.freed_worker_s + 1e-6
