"""Running samples move between members that stay, and nothing that happens meanwhile loses one."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.coordinator import Coordinator
from actors.journal import Journal, MemoryJournal
from actors.rollout_api import SampleResult, Strategy
from actors.settings import PlanningSettings, RuntimeSettings
from placement.dispatch import plan_dispatch
from placement.errors import WorkerLostError
from placement.ids import RolloutId, WorkerId
from placement.membership import Phase
from placement.release import IdlePolicy, ReleaseRule, decide_width, keep
from placement.views import Binding, DispatchPlan, GroupView, Move, MoveKind, WidthDecision
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
)
from tests.unit.test_coordinator_chaos import misfortunes, one_rollout
from tests.unit.virtual_time import clock, run, until

LENGTHS = [60, 65, 70, 75, 80, 90, 100, 110]


class FakeRingRule:
    """A dispatch rule that binds as the simple one does and, asked with an empty queue, moves the
    first sample of each worker (or of so many) to the next worker, has that room or not."""

    def __init__(
        self, after_each: Callable[[], None] = lambda: None, num_sources: int | None = None
    ) -> None:
        self._num_sources = num_sources
        self.planned: list[Move] = []
        self.times: list[float] = []
        self._after_each = after_each

    def __call__(self, view: GroupView) -> DispatchPlan:
        if view.queued:
            return plan_dispatch(view)
        members = [worker.worker_id for worker in view.workers]
        moves = []
        for position, source in enumerate(members[: self._num_sources]):
            here = [s for s in view.running if s.worker_id == source]
            destination = members[(position + 1) % len(members)]
            if here and destination != source:
                moves.append(Move(here[0].sample_id, source, destination, MoveKind.COPY))
        if moves:
            self.planned += moves
            self.times.append(clock())
            self._after_each()
        return DispatchPlan((), tuple(moves))


def _nobody_leaves(view: GroupView, _: IdlePolicy) -> WidthDecision:
    return keep(view, "nobody leaves in this test")


def _settings(move_by: str = "copy", **group: object) -> RuntimeSettings:
    planning = PlanningSettings(rebalance=True, rebalance_steps=5)
    settings = make_settings(move_samples_by=move_by, **group)
    return settings.model_copy(update={"planning": planning})


def _coordinator(
    world: World,
    rule: FakeRingRule,
    settings: RuntimeSettings,
    release_rule: ReleaseRule = _nobody_leaves,
    journal: Journal | None = None,
) -> Coordinator:
    return Coordinator(
        settings,
        world.leases,
        world.factory,
        world.store,
        clock,
        keeper=world.keeper,
        journal=journal,
        dispatch=rule,
        release_rule=release_rule,
    )


@asynccontextmanager
async def _started(world: World, coordinator: Coordinator) -> AsyncIterator[Coordinator]:
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.shutdown()
        await world.factory.stop()
        assert world.is_clean(), "something is still leased or running"


async def _decoded(coordinator: Coordinator, lengths: list[int] = LENGTHS) -> list[SampleResult]:
    await coordinator.submit(make_request("r", lengths))
    results = await all_results(coordinator, "r")
    check_tokens(results, lengths)
    await check_usage_adds_up(coordinator, "r")
    return results


def _moved(results: list[SampleResult]) -> set[str]:
    return {result.sample_id for result in results if len(result.worker_ids) > 1}


@pytest.mark.parametrize("move_by", ["copy", "recompute", "auto"])
def test_moved_samples_go_where_they_were_sent_and_no_token_changes(move_by: str) -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        async with _started(world, _coordinator(world, rule, _settings(move_by))) as coordinator:
            results = await _decoded(coordinator)
            sent: dict[str, list[WorkerId]] = {}
            for move in rule.planned:
                sent.setdefault(move.sample_id, [move.source]).append(move.destination)
            for result in results:
                # The last move may have come too late.
                path = sent.get(result.sample_id, list(result.worker_ids))
                assert list(result.worker_ids) in (path, path[:-1])
            assert len(_moved(results)) >= 4
            assert set(world.factory.copied) == (
                _moved(results) if move_by != "recompute" else set()
            )

    run(main())


def test_the_next_look_waits_for_the_last_move_and_for_its_interval() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        world.factory.cancel_s = 2.0
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            await _decoded(coordinator)
            apart_s = [b - a for a, b in zip(rule.times, rule.times[1:], strict=False)]
            assert apart_s
            assert min(apart_s) >= 2.0
        world, rule = World(), FakeRingRule()
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            await _decoded(coordinator)
            apart_s = [b - a for a, b in zip(rule.times, rule.times[1:], strict=False)]
            assert min(apart_s) >= 5 * 0.05 - 1e-6

    run(main())


def test_a_sample_that_ends_before_it_is_let_go_simply_ends() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        world.factory.cancel_s = 20.0
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            results = await _decoded(coordinator)
            assert rule.planned
            assert not _moved(results)
            again = make_request("again", LENGTHS)
            world.factory.cancel_s = 0.0
            await coordinator.submit(again)
            results = await all_results(coordinator, "again")
            assert _moved(results), "what ended by itself must not hold the next moves up"

    run(main())


@pytest.mark.parametrize("call", ["cancel", "cancelled", "fetch_kv", "submit"])
def test_a_source_or_destination_that_dies_in_between_loses_nothing(call: str) -> None:
    async def main() -> None:
        world = World()

        def break_one() -> None:
            if len(rule.times) == 1:
                world.factory.faults[1, call] = WorkerLostError("killed")

        rule = FakeRingRule(break_one)
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            results = await _decoded(coordinator)
            assert not world.factory.faults, "nobody died"
            assert not world.factory.workers[WorkerId(1)].alive
            assert max(w for result in results for w in result.worker_ids) > 3

    run(main())


def test_a_coordinator_that_dies_in_between_comes_back_and_loses_nothing() -> None:
    async def main() -> None:
        world, rule, journal = World(), FakeRingRule(), MemoryJournal()
        world.factory.fetch_s = 1.0
        first = world.coordinator()  # remembers what was there before
        first = _coordinator(world, rule, _settings(), journal=journal)
        await first.start()
        await first.submit(make_request("r", LENGTHS))
        await until(lambda: bool(rule.planned), "a move")
        moving = rule.planned[0].sample_id
        await until(
            lambda: moving not in world.factory.workers[rule.planned[0].source].samples,
            "its source has let go",
        )
        await world.coordinator_dies()
        later = FakeRingRule()
        second = _coordinator(world, later, _settings(), journal=journal)
        async with _started(world, second) as coordinator:
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            assert later.planned

    run(main())


def test_releases_go_on_beside_moves() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        tail = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]
        settings = _settings()
        world.factory.cancel_s = 0.3  # so that changes begin while something is under way
        coordinator = _coordinator(world, rule, settings, decide_width)
        async with _started(world, coordinator):
            results = await _decoded(coordinator, tail)
            operations = await coordinator.operations()
            done = [op for op in operations if op.phase is Phase.DONE]
            assert any(len(op.new_members) < len(op.old_members) for op in done)
            assert _moved(results)

    run(main())


def test_while_the_group_changes_a_sample_goes_back_to_where_the_change_counts_it() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        world.factory.cancel_s = 1.0
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await until(lambda: bool(rule.planned), "a move")
            move, rebalancing = rule.planned[0], coordinator._steering._rebalancing
            assert rebalancing is not None
            assert rebalancing.arrivals(frozenset(), changing=True) == [], "it still runs"
            coordinator._backlog.let_go(move.sample_id, move.source)
            back = rebalancing.arrivals(frozenset(), changing=True)
            assert back == [Binding(move.sample_id, move.source)]
            assert rebalancing.arrivals(frozenset(), changing=True) == [], "once"

    run(main())


def test_a_sample_whose_place_is_taken_goes_back_to_where_there_is_room() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule(num_sources=1)
        settings = _settings(max_samples_per_worker=2)  # all places are taken
        async with _started(world, _coordinator(world, rule, settings)) as coordinator:
            results = await _decoded(coordinator)
            assert rule.times[0] < clock() - 0.05 * min(LENGTHS) / 2, "it was asked while all ran"
            assert set(world.factory.copied.values()) & {(0, 0)}
            assert len(results) == len(LENGTHS)

    run(main())


def test_a_static_rollout_stays_as_it_was_cut() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS, strategy=Strategy.STATIC))
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            assert not rule.planned

    run(main())


def test_an_aborted_sample_does_not_come_back() -> None:
    async def main() -> None:
        world, rule = World(), FakeRingRule()
        async with _started(world, _coordinator(world, rule, _settings())) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await until(lambda: bool(rule.planned), "a move")
            await coordinator.abort(RolloutId("r"))
            results = await all_results(coordinator, "r")
            assert len(results) == len(LENGTHS)
            await asyncio.sleep(5.0)
            assert not any(w.samples for w in world.factory.workers.values())

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_meanwhile_every_sample_ends_once(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        world, rule = World(), FakeRingRule()
        world.factory.cancel_s = rng.choice([0.0, 0.2, 1.0])
        settings = _settings(rng.choice(["copy", "recompute", "auto"]))
        coordinator = _coordinator(world, rule, settings, decide_width)
        async with _started(world, coordinator):
            fate = asyncio.ensure_future(misfortunes(world, rng))
            await asyncio.gather(*(one_rollout(coordinator, rng, f"r{i}") for i in range(3)))
            await fate
            await one_rollout(coordinator, rng, "last")
        assert rule.planned

    run(main())
