"""A coordinator that dies at any moment and comes back on its journal's directory: every sample
ends once, with the right tokens, and a reader that goes on from its cursor sees each of them
once."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from actors.coordinator import Coordinator
from actors.durable_journal import DurableJournal
from actors.rollout_api import (
    CancelledBy,
    RolloutRequest,
    RolloutState,
    SampleResult,
    Strategy,
)
from actors.settings import CoordinatorSettings, PlanningSettings, RuntimeSettings
from placement.errors import FlexFloorError, OverloadedError, UnavailableError, WorkerLostError
from placement.ids import RolloutId
from placement.samples import FinishReason
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
)
from tests.unit.fake_cluster import expected_response
from tests.unit.fake_disk import FakeDisk
from tests.unit.virtual_time import clock, run, until

TAIL = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]
AGAIN_S = 0.05


class Lives:
    """One coordinator after the other, on one disk, among the same workers.

    Attributes:
        now: the one that serves; None between two of them.
    """

    def __init__(self, settings: RuntimeSettings | None = None, segment_bytes: int = 4096) -> None:
        self.world = World()
        self.disk = FakeDisk()
        self.settings = settings or make_settings()
        self.now: Coordinator | None = None
        self.segment_bytes = segment_bytes
        self.journal: DurableJournal | None = None

    @property
    def trouble(self) -> str:
        assert self.journal is not None
        return self.journal.figures().trouble

    async def begin(self, max_bytes: int = 1 << 30) -> Coordinator:
        journal = self.journal = DurableJournal(
            self.disk,
            "model",
            max_bytes,
            segment_bytes=self.segment_bytes,
            off_loop=self.disk.off_loop,
        )
        coordinator = self.world.coordinator(self.settings, journal)
        await coordinator.start()
        self.now = coordinator
        return coordinator

    async def die(self, rng: random.Random) -> None:
        self.now = None
        await self.world.coordinator_dies()
        self.disk.lose_power(rng)

    async def end(self) -> None:
        assert self.now is not None
        await self.now.shutdown()
        await self.world.factory.stop()
        assert self.world.is_clean(), "something is still leased or running"


@asynccontextmanager
async def lives(
    settings: RuntimeSettings | None = None, segment_bytes: int = 4096
) -> AsyncIterator[Lives]:
    these = Lives(settings, segment_bytes)
    await these.begin()
    yield these
    await these.end()


class Reader:
    """A client that reads one rollout by its cursor, whichever coordinator answers."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = RolloutId(rollout_id)
        self.samples: list[SampleResult] = []
        self.done = False
        self._cursor = 0
        self._token_cursor = 0
        self._tokens: dict[int, list[int]] = {}
        self._ended: list[int] = []

    async def read(self, coordinator: Coordinator, wait_s: float = 0.5) -> None:
        """One portion of tokens, and one of endings."""
        batch = await coordinator.new_tokens(self.rollout_id, self._token_cursor, wait_s, 50)
        for news in batch.news:
            tokens = self._tokens.setdefault(news.prompt_index, [])
            assert news.start == len(tokens), "tokens were lost or came twice"
            tokens += news.token_ids
            self._ended += [news.prompt_index] * (news.finish_reason is not None)
        self._token_cursor = batch.cursor
        finished = await coordinator.results(self.rollout_id, self._cursor, 0.0, 7)
        self.samples += finished.samples
        self._cursor = finished.cursor
        self.done = batch.done and finished.done

    def check(self, lengths: list[int]) -> None:
        assert sorted(self._ended) == list(range(len(lengths))), "not every sample ended once"
        samples = sorted(self.samples, key=lambda sample: sample.prompt_index)
        assert [sample.prompt_index for sample in samples] == list(range(len(lengths)))
        for sample, length in zip(samples, lengths, strict=True):
            count = len(sample.token_ids)
            assert sample.token_ids == expected_response(sample.seed, 3, count)
            assert tuple(self._tokens.get(sample.prompt_index, [])) == sample.token_ids
            assert len(sample.logprobs) == count
            assert sample.weight_versions == (((0, "0"),) if count else ())
            if sample.finish_reason is FinishReason.STOP:
                assert count == length
            else:
                assert sample.finish_reason in (FinishReason.ABORT, FinishReason.FAILED)


def random_settings(rng: random.Random) -> RuntimeSettings:
    planning = PlanningSettings(
        policy=rng.choice(["first_rule", "planner"]), unit="steps", replan_steps=4
    )
    settings = make_settings(idle_workers=rng.choice(["all", "floor"]))
    return settings.model_copy(update={"planning": planning})


async def a_life(these: Lives, rng: random.Random, readers: dict[str, Reader]) -> None:
    """Until it is cut short: whoever reads goes on, and new rollouts come."""
    coordinator = these.now
    assert coordinator is not None
    for name in readers:  # who got no answer sends it again
        await coordinator.submit(load(name))
    for name in LOADS:
        if name not in readers and rng.random() < 0.6:
            readers[name] = Reader(name)
            await coordinator.submit(load(name))
            if name == "aborted" and rng.random() < 0.7:
                await asyncio.sleep(rng.uniform(0, 2))
                await coordinator.abort(RolloutId(name))
        await asyncio.sleep(rng.expovariate(1.0))
    while True:
        for reader in readers.values():
            await reader.read(coordinator)
        await asyncio.sleep(0.1)


LOADS = {
    "tail": TAIL,
    "aborted": [50] * 6,
    "late": [90] * 8,
    "static": [9, 30, 60, 20] * 3,
    "few": [3, 90],
}


def load(name: str) -> RolloutRequest:
    strategy = Strategy.STATIC if name == "static" else Strategy.ELASTIC
    request = make_request(name, LOADS[name], strategy=strategy)
    return replace(request, deadline_s=2.0 if name == "late" else None)


@pytest.mark.parametrize("seed", range(24))
def test_whenever_the_coordinator_dies_every_sample_is_told_once(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with lives(random_settings(rng)) as these:
            these.disk.write_s = rng.choice([0.004, 0.3])
            these.world.factory.cancel_s = rng.choice([0.0, 0.0, 12.0])
            readers: dict[str, Reader] = {}
            for _ in range(rng.randint(1, 6)):
                living = asyncio.ensure_future(a_life(these, rng, readers))
                await asyncio.sleep(rng.choice([rng.uniform(0, 0.2), rng.uniform(0, 8)]))
                assert not living.done(), living.exception()
                assert these.now is not None
                assert b"group_restarts_total 0.0" in await these.now.metrics_text()
                await these.die(rng)
                await these.begin()
            coordinator = these.now
            assert coordinator is not None
            for name, lengths in LOADS.items():
                await coordinator.submit(load(name))
                reader = readers.setdefault(name, Reader(name))
                deadline = clock() + 300
                while not reader.done:
                    assert clock() < deadline, f"{name} does not end"
                    await reader.read(coordinator)
                reader.check(lengths)
                await check_usage_adds_up(coordinator, name)

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_samples_that_run_on_living_workers_go_on_there() -> None:
    async def main() -> None:
        async with lives() as these:
            assert these.now is not None
            await these.now.submit(make_request("r", [60] * 10))
            await asyncio.sleep(1.0)
            steps = {w.worker_id: w.steps for w in these.world.factory.workers.values()}
            await these.die(random.Random(1))
            await asyncio.sleep(0.5)
            second = await these.begin()
            results = await all_results(second, "r")
            check_tokens(results, [60] * 10)
            assert all(len(result.worker_ids) == 1 for result in results), "a sample moved"
            assert these.world.factory.living()[:1] == sorted(steps)[:1]
            assert len(these.world.factory.workers) == 4, "a worker was started anew"

    run(main())


def test_an_ended_rollout_is_there_after_a_restart_as_it_was() -> None:
    async def main() -> None:
        async with lives() as these:
            assert these.now is not None
            await these.now.submit(make_request("r", TAIL))
            results = await all_results(these.now, "r")
            status = await these.now.status(RolloutId("r"))
            await these.die(random.Random(1))
            second = await these.begin()
            assert await all_results(second, "r") == results
            assert await second.status(RolloutId("r")) == status

    run(main())


def test_a_restart_in_the_middle_of_a_change_of_the_group_costs_no_token() -> None:
    async def main() -> None:
        for seed in range(6):
            async with lives() as these:
                assert these.now is not None
                first = these.now
                await first.submit(make_request("r", TAIL))
                change = []
                while not change:
                    change = [o for o in await first.operations() if o.ended_at is None]
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.02 * seed)
                await these.die(random.Random(seed))
                second = await these.begin()
                check_tokens(await all_results(second, "r"), TAIL)
                await check_usage_adds_up(second, "r")

    run(main())


def test_a_runtime_that_is_launched_anew_ends_what_the_last_one_had_accepted() -> None:
    """Its workers have the ids of those that decoded before, and none of their samples."""

    async def main() -> None:
        these = Lives()
        first = await these.begin()
        await first.submit(make_request("r", [60] * 10))
        await asyncio.sleep(1.0)
        await these.die(random.Random(1))
        await these.world.factory.stop()
        these.world = World()
        second = await these.begin()
        check_tokens(await all_results(second, "r"), [60] * 10)
        await these.end()

    run(main())


def test_an_abort_that_was_begun_is_finished_by_the_next_coordinator() -> None:
    async def main() -> None:
        async with lives() as these:
            assert these.now is not None
            these.world.factory.cancel_s = 3.0
            await these.now.submit(make_request("r", [100] * 6))
            await asyncio.sleep(1.0)
            aborting = asyncio.ensure_future(these.now.abort(RolloutId("r")))
            await asyncio.sleep(0.5)
            assert not aborting.done()
            await these.die(random.Random(1))
            these.world.factory.cancel_s = 0.0
            second = await these.begin()
            results = await all_results(second, "r")
            assert {result.cancelled_by for result in results} == {CancelledBy.CALLER}
            assert (await second.status(RolloutId("r"))).state is RolloutState.ABORTED

    run(main())


def test_a_full_disk_refuses_new_work_and_what_was_accepted_ends_when_there_is_room() -> None:
    async def main() -> None:
        async with lives() as these:
            first = these.now
            assert first is not None
            await first.submit(make_request("r", [40] * 8))
            await asyncio.sleep(0.5)
            these.disk.room_bytes = 100
            await until(lambda: bool(these.trouble), "the disk is full", 5.0)
            with pytest.raises(UnavailableError, match="No space left"):
                await first.submit(make_request("next", [5]))
            with pytest.raises(UnavailableError, match="make room"):
                await first.status(RolloutId("r"))
            health = await first.health()
            assert not health.healthy
            assert "No space left" in health.detail
            await asyncio.sleep(5.0)
            these.disk.room_bytes = 1 << 30
            await until(lambda: not these.trouble, "it is written", 5.0)
            check_tokens(await all_results(first, "r"), [40] * 8)
            assert b"flexfloor_group_restarts_total 0.0" in await first.metrics_text()

    run(main())


def test_a_coordinator_that_dies_with_a_full_disk_comes_back_and_loses_nothing() -> None:
    async def main() -> None:
        async with lives() as these:
            assert these.now is not None
            await these.now.submit(make_request("r", [40] * 8))
            await asyncio.sleep(0.5)
            these.disk.room_bytes = 100
            await asyncio.sleep(1.0)
            await these.die(random.Random(3))
            these.disk.room_bytes = 1 << 30
            second = await these.begin()
            check_tokens(await all_results(second, "r"), [40] * 8)

    run(main())


def test_a_full_journal_forgets_ended_rollouts_before_it_refuses() -> None:
    async def main() -> None:
        keep = CoordinatorSettings(keep_ended_s=0.0)
        settings = make_settings().model_copy(update={"coordinator": keep})
        these = Lives(settings, segment_bytes=1000)
        coordinator = await these.begin(max_bytes=20_000)
        for index in range(20):
            await coordinator.submit(make_request(f"r{index}", [20] * 4))
            check_tokens(await all_results(coordinator, f"r{index}"), [20] * 4)
        assert these.disk.size_bytes < 30_000
        with pytest.raises(FlexFloorError):
            await coordinator.status(RolloutId("r0"))
        await coordinator.submit(make_request("open", [140] * 80))
        await until(lambda: these.disk.size_bytes > 40_000, "it is full")
        with pytest.raises(OverloadedError, match="journal_max_bytes"):
            await coordinator.submit(make_request("next", [140] * 10))
        await coordinator.abort(RolloutId("open"))
        await these.end()

    run(main())


def test_a_member_that_dies_with_the_coordinator_costs_no_token() -> None:
    async def main() -> None:
        async with lives() as these:
            assert these.now is not None
            await these.now.submit(make_request("r", [60] * 10))
            await asyncio.sleep(1.0)
            await these.die(random.Random(5))
            these.world.factory.workers[these.world.factory.living()[1]].die()
            these.world.factory.faults[0, "collect"] = WorkerLostError("killed")
            second = await these.begin()
            check_tokens(await all_results(second, "r"), [60] * 10)

    run(main())
