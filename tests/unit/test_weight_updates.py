"""Updates of the weights, with workers and a keeper that know versions only: one version per step
for the whole group, whatever goes wrong, and no token lost. (The fakes themselves fail if a worker
decodes while its weights change, or beside one that has others.)
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from actors.control_api import DiskWeights, ObjectWeights, PauseMode, WeightStatus, WeightUpdate
from actors.coordinator import Coordinator
from actors.journal import MemoryJournal
from placement.errors import (
    FlexFloorError,
    RequestError,
    UnavailableError,
    WeightUpdateError,
    WorkerLostError,
)
from placement.ids import RolloutId
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.fake_cluster import BUILD_S, STEP_S
from tests.unit.fake_keeper import COPY_BYTES
from tests.unit.virtual_time import run, until

LENGTHS = [30, 40, 60, 80, 100, 120]


def _objects(version: str, base: str | None = None, **place: Any) -> WeightUpdate:
    return WeightUpdate(ObjectWeights(()), version, base, **place)


def _disk(version: str, path: str = "/weights") -> WeightUpdate:
    return WeightUpdate(DiskWeights(path), version)


def _versions(world: World) -> set[str | None]:
    return {world.factory.workers[w].weight_version for w in world.factory.members}


def _scene(play: Any, world: World | None = None, **group: Any) -> None:
    """``play(world, coordinator)`` with a rollout that is under way."""

    async def scene() -> None:
        there = world or World()
        async with started(there, make_settings(**group)) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await asyncio.sleep(10 * STEP_S)
            await play(there, coordinator)

    run(scene())


def test_an_update_under_load_loses_no_token_and_spans_name_both_versions() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        status = await coordinator.update_weights(_objects("step-1"))
        assert (status.version, status.received_bytes) == ("step-1", 7)
        assert status.copy_bytes == COPY_BYTES
        assert {"wait", "hold", "load", "commit"} <= status.phases_s.keys()
        assert _versions(world) == {"step-1"}
        assert (await coordinator.served_model()).weight_version == "step-1"
        results = await all_results(coordinator, "r")
        check_tokens(results, LENGTHS)
        for result in results:
            assert result.weight_version == "step-1"
            (first, old), (changed, new) = result.weight_versions
            assert (first, old, new) == (0, "0", "step-1")
            assert 0 < changed < len(result.token_ids)
        await check_usage_adds_up(coordinator, "r")

    _scene(play)


def test_news_name_the_versions_of_their_own_tokens() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        before = await coordinator.tokens(RolloutId("r"), (0,) * len(LENGTHS), 1.0)
        await coordinator.update_weights(_objects("1"))
        await asyncio.sleep(10 * STEP_S)
        known = tuple(len(news.token_ids) for news in before)
        after = await coordinator.tokens(RolloutId("r"), known, 1.0)
        assert {news.weight_versions for news in before} == {((0, "0"),)}
        assert all(news.weight_version == "1" for news in after)
        assert all(news.weight_versions[0] == (news.start, "0") for news in after)
        assert all(news.weight_versions[1][1] == "1" for news in after)

    _scene(play)


@pytest.mark.parametrize(
    ("update", "field", "says"),
    [
        (_objects("0"), "version", "'0' is in use"),
        (_objects(""), "version", "has 0 characters"),
        (_objects("x" * 257), "version", "has 257 characters"),
        (_objects("2", base="1"), "base_version", "is '1', and '0' is served"),
    ],
)
def test_a_wrong_update_is_refused_and_touches_nothing(
    update: WeightUpdate, field: str, says: str
) -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        with pytest.raises(RequestError, match=says) as refused:
            await coordinator.update_weights(update)
        assert refused.value.field == field
        assert not world.keeper.started
        status = await coordinator.weight_status()
        assert (status.version, status.failed_version) == ("0", update.version)
        assert says in status.error
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


def test_a_served_version_cannot_come_again_and_a_delta_needs_it() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_objects("1"))
        with pytest.raises(RequestError, match="'1' is in use"):
            await coordinator.update_weights(_objects("1"))
        with pytest.raises(RequestError, match="is '0', and '1' is served"):
            await coordinator.update_weights(_objects("2", base="0"))
        await coordinator.update_weights(_objects("2", base="1"))
        assert (await coordinator.weight_status()).error == ""
        assert _versions(world) == {"2"}

    _scene(play)


def test_one_update_at_a_time() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        first = asyncio.ensure_future(coordinator.update_weights(_objects("1")))
        await asyncio.sleep(0.1)
        with pytest.raises(UnavailableError, match=r"another update .* is under way"):
            await coordinator.update_weights(_objects("2"))
        assert (await first).version == "1"

    _scene(play)


def test_a_caller_that_goes_away_leaves_nothing_half_done() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        caller = asyncio.ensure_future(coordinator.update_weights(_objects("1")))
        await asyncio.sleep(0.7)  # staged, and being loaded
        caller.cancel()
        await until(lambda: _versions(world) == {"1"}, "the update to come")
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        assert (await coordinator.weight_status()).version == "1"

    _scene(play)


def test_parts_are_staged_and_the_last_one_is_loaded() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        status = await coordinator.update_weights(_objects("a", last=False))
        assert (status.version, status.parts_version) == ("0", "a")
        await coordinator.update_weights(_objects("b", first=False, last=False))
        assert world.keeper.parts == ["a", "b"]
        assert _versions(world) == {"0"}
        status = await coordinator.update_weights(_objects("7", first=False))
        assert (status.version, status.parts_version) == ("7", "")
        assert _versions(world) == {"7"}

    _scene(play)


def test_a_worker_that_cannot_load_leaves_the_old_version_on_all() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_objects("1"))
        members = world.factory.members
        world.factory.faults[members[-1], "load_weights"] = WeightUpdateError("no such tensor")
        with pytest.raises(
            WeightUpdateError, match=r"version 2 .*no such tensor; version 1 serves"
        ):
            await coordinator.update_weights(_objects("2"))
        assert world.factory.members == members
        assert _versions(world) == {"1"}
        assert (world.keeper.committed, world.keeper.staged) == ("1", "")
        status = await coordinator.weight_status()
        assert (status.version, status.failed_version) == ("1", "2")
        assert (await coordinator.update_weights(_objects("2"))).version == "2"
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


def _lose_one(world: World, coordinator: Coordinator, call: str) -> Coroutine[Any, Any, None]:
    """A worker ends in ``call`` of the update to "2"; the group comes back with "1"."""

    async def play() -> None:
        await coordinator.update_weights(_objects("1"))
        members = world.factory.members
        world.factory.faults[members[1], call] = WorkerLostError("killed")
        with pytest.raises(WeightUpdateError, match="version 1 serves on"):
            await coordinator.update_weights(_objects("2"))
        await until(lambda: not set(world.factory.members) & set(members), "another group")
        assert _versions(world) == {"1"}
        results = await all_results(coordinator, "r")
        check_tokens(results, LENGTHS)
        assert {result.weight_version for result in results} == {"1"}

    return play()


@pytest.mark.parametrize("call", ["hold", "load_weights"])
def test_a_worker_that_dies_on_the_way_costs_the_update_and_no_token(call: str) -> None:
    _scene(lambda world, coordinator: _lose_one(world, coordinator, call))


def test_a_worker_that_dies_on_the_way_back_costs_the_group_and_no_token() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        members = world.factory.members
        world.factory.faults[members[0], "load_weights"] = WeightUpdateError("no such tensor")

        async def die_when_all_have_loaded() -> None:
            await until(lambda: None in _versions(world), "the load")
            await until(lambda: _versions(world) >= {"1"}, "its end on some")
            world.factory.faults[members[1], "load_weights"] = WorkerLostError("killed")

        killer = asyncio.ensure_future(die_when_all_have_loaded())
        with pytest.raises(WeightUpdateError, match="version 0 serves on"):
            await coordinator.update_weights(_objects("1"))
        await killer
        await until(lambda: not set(world.factory.members) & set(members), "another group")
        assert _versions(world) == {"0"}
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


def test_a_change_that_is_under_way_ends_before_the_weights_do() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await until(lambda: coordinator._steering.change is not None, "a release")
        change = coordinator._steering.change
        assert change is not None
        status = await coordinator.update_weights(_objects("1"))
        assert change.progress.ended
        assert status.phases_s["wait"] > 0
        assert _versions(world) == {"1"}
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


def test_an_update_does_not_wait_for_workers_that_are_built_to_join() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        await until(lambda: len(world.factory.members) < len(world.factory.living()), "a joiner")
        old = world.factory.members
        seconds = (await coordinator.update_weights(_objects("1"))).seconds
        assert seconds < BUILD_S / 2
        assert world.factory.members == old
        await until(lambda: len(world.factory.members) == 4, "growth")
        assert _versions(world) == {"1"}
        (growth,) = [o for o in await coordinator.operations() if o.reason == "drained"]
        assert growth.error == ""

    _scene(play)


@pytest.mark.parametrize("after_s", [0.6, 0.8])
def test_a_coordinator_that_dies_while_workers_are_built_and_weights_loaded_leaves_nobody(
    after_s: float,
) -> None:
    async def scene() -> None:
        world, journal = World(), MemoryJournal()
        coordinator = world.coordinator(None, journal)
        await coordinator.start()
        await coordinator.submit(make_request("r", LENGTHS))
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        await until(lambda: len(world.factory.members) < len(world.factory.living()), "a joiner")
        joiners = set(world.factory.living()) - set(world.factory.members)
        update = asyncio.ensure_future(coordinator.update_weights(_objects("1")))
        await asyncio.sleep(after_s)
        coordinator = await _coordinator_comes_back(world, journal)
        await asyncio.wait([update])
        assert not joiners & set(world.factory.living())
        await coordinator.shutdown()
        await world.factory.stop()
        assert world.is_clean()

    run(scene())


def test_whoever_joins_later_has_the_version_of_the_peers() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await until(lambda: len(world.factory.members) == 1, "one worker")
        await coordinator.update_weights(_objects("1"))
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        await until(lambda: len(world.factory.members) == 4, "growth")
        assert _versions(world) == {"1"}

    _scene(play)


def test_a_group_that_is_founded_later_begins_with_the_committed_version() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_objects("1"))
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        await until(lambda: not world.factory.living(), "nobody to be left")
        status = await coordinator.update_weights(_objects("2"))  # and nobody to load it
        assert status.version == "2"
        await coordinator.submit(make_request("s", [9, 9]))
        results = await all_results(coordinator, "s")
        assert {result.weight_versions for result in results} == {((0, "2"),)}

    _scene(play, idle_workers="none")


def test_weights_come_while_the_group_is_paused_and_it_stays_paused() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.pause(PauseMode.KEEP, wait_s=10.0)
        before = (await coordinator.status(RolloutId("r"))).response_tokens
        await coordinator.update_weights(_objects("1"))
        await asyncio.sleep(5.0)
        assert (await coordinator.status(RolloutId("r"))).response_tokens == before
        await coordinator.resume()
        check_tokens(await all_results(coordinator, "r"), LENGTHS)
        assert _versions(world) == {"1"}

    _scene(play)


def test_weights_come_while_the_group_is_asleep() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.sleep(PauseMode.KEEP, wait_s=30.0)
        assert not world.factory.living()
        assert (await coordinator.update_weights(_objects("1"))).version == "1"
        await coordinator.wake(wait_s=60.0)
        results = await all_results(coordinator, "r")
        check_tokens(results, LENGTHS)
        assert {result.weight_version for result in results} == {"1"}

    _scene(play)


def _group_dies(world: World) -> None:
    world.factory.workers[world.factory.members[0]].die()


def test_weights_that_are_lost_are_not_replaced_by_older_ones() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_objects("1"))
        world.keeper.die()
        await asyncio.sleep(STEP_S)
        assert (await coordinator.weight_status()).copy_bytes == 0
        assert _versions(world) == {"1"}  # who has them serves on
        _group_dies(world)
        results = await all_results(coordinator, "r")
        assert all("weights of version 1 are lost" in r.error for r in results if r.error)
        assert any(r.error for r in results)
        assert not world.factory.living()
        await coordinator.update_weights(_objects("2"))
        await coordinator.submit(make_request("s", [9, 9]))
        later = await all_results(coordinator, "s")
        assert {result.weight_version for result in later} == {"2"}

    _scene(play)


def test_weights_that_lie_on_disk_are_read_again() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_disk("1"))
        disk = world.keeper.disk
        world.keeper.die()
        world.keeper.disk = disk
        _group_dies(world)
        results = await all_results(coordinator, "r")
        check_tokens(results, LENGTHS)
        assert {result.weight_version for result in results} == {"1"}
        assert world.keeper.committed == "1"

    _scene(play)


def test_weights_on_disk_that_have_changed_are_not_taken_for_the_served_ones() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_disk("1"))
        world.keeper.die()
        world.keeper.disk = {"/weights": "something else"}
        _group_dies(world)
        results = await all_results(coordinator, "r")
        assert any("weights of version 1 are lost" in result.error for result in results)

    _scene(play)


def test_a_keeper_that_dies_before_it_commits_costs_the_copy_and_not_the_version() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        world.keeper.faults["commit"] = UnavailableError("the keeper has ended")
        status = await coordinator.update_weights(_objects("1"))
        assert (status.version, status.copy_bytes) == ("1", 0)
        assert _versions(world) == {"1"}
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


def test_a_keeper_that_dies_while_it_stages_costs_nothing() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        world.keeper.faults["stage"] = UnavailableError("the keeper has ended")
        with pytest.raises(UnavailableError):
            await coordinator.update_weights(_objects("1"))
        assert (await coordinator.update_weights(_objects("1"))).version == "1"
        check_tokens(await all_results(coordinator, "r"), LENGTHS)

    _scene(play)


async def _coordinator_comes_back(world: World, journal: MemoryJournal) -> Coordinator:
    await world.coordinator_dies()
    coordinator = world.coordinator(None, journal)
    await coordinator.start()
    return coordinator


@pytest.mark.parametrize("after_s", [0.2, 0.6, 0.8, 1.2])
def test_a_coordinator_that_dies_at_any_point_of_an_update_serves_one_version(
    after_s: float,
) -> None:
    async def scene() -> None:
        world, journal = World(), MemoryJournal()
        coordinator = world.coordinator(None, journal)
        await coordinator.start()
        await coordinator.submit(make_request("r", LENGTHS))
        await asyncio.sleep(10 * STEP_S)
        await coordinator.update_weights(_objects("1"))
        update = asyncio.ensure_future(coordinator.update_weights(_objects("2")))
        await asyncio.sleep(after_s)
        coordinator = await _coordinator_comes_back(world, journal)
        await asyncio.wait([update])
        results = await all_results(coordinator, "r")
        check_tokens(results, LENGTHS)
        status = await coordinator.weight_status()
        assert results[-1].weight_version == status.version == world.keeper.committed
        assert _versions(world) == {status.version}
        await coordinator.shutdown()
        await world.factory.stop()
        assert world.is_clean()

    run(scene())


def test_when_all_but_the_keeper_is_lost_old_weights_do_not_come_back() -> None:
    async def scene() -> None:
        world, journal = World(), MemoryJournal()
        coordinator = world.coordinator(None, journal)
        await coordinator.start()
        await coordinator.submit(make_request("r", LENGTHS))
        await coordinator.update_weights(_objects("1"))
        world.store.last = None
        for worker_id in world.factory.living():
            world.factory.workers[worker_id].die()
        coordinator = await _coordinator_comes_back(world, journal)
        assert (await coordinator.weight_status()).version == "1"
        await coordinator.shutdown()
        await world.factory.stop()

    run(scene())


def test_metrics_tell_versions_bytes_seconds_and_who_began_with_older_weights() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        await coordinator.update_weights(_disk("step-1"))
        with pytest.raises(FlexFloorError):
            await coordinator.update_weights(_objects("step-1"))
        text = (await coordinator.metrics_text()).decode()
        for line in (
            'flexfloor_weight_version{version="step-1"} 1.0',
            'flexfloor_weight_updates_total{end="served",source="disk"} 1.0',
            'flexfloor_weight_updates_total{end="failed",source="object"} 1.0',
            'flexfloor_weight_bytes_total{source="disk"} 7.0',
            'flexfloor_weight_update_seconds_count{source="disk"} 1.0',
            f"flexfloor_weight_copy_bytes {float(COPY_BYTES)}",
            f"flexfloor_old_weight_samples {float(len(LENGTHS))}",
        ):
            assert line in text.splitlines()
        assert 'version="0"' not in text

    _scene(play)


def test_health_says_why_nobody_decodes_while_weights_are_loaded() -> None:
    async def play(world: World, coordinator: Coordinator) -> None:
        update = asyncio.ensure_future(coordinator.update_weights(_objects("1")))
        await until(lambda: None in _versions(world), "the load")
        health = await coordinator.health()
        assert health.healthy
        assert health.detail == "version 1 of the weights is loaded"
        status: WeightStatus = await update
        assert status.version == "1"
        assert "loaded" not in (await coordinator.health()).detail

    _scene(play)
