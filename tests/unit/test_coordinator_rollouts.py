import asyncio
import math
from dataclasses import replace

import pytest

from actors.rollout_api import RolloutState, Strategy
from placement.errors import OverloadedError, RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId, SampleId
from placement.samples import FinishReason, Sampling
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.fake_cluster import expected_response
from tests.unit.virtual_time import run, until

TAIL = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]


def test_a_rollout_is_decoded_and_releases_workers_as_its_tail_gets_thin() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            results = await all_results(coordinator, "r")
            check_tokens(results, TAIL)
            assert all(result.finish_reason is FinishReason.STOP for result in results)
            status = await coordinator.status(RolloutId("r"))
            assert status.state is RolloutState.FINISHED
            operations = [op for op in await coordinator.operations() if op.phase == "done"]
            assert len(operations[0].new_members) < len(operations[0].old_members)
            first = operations[0]
            assert first.finished_ratio_at_start > 0
            assert first.pause_s == 0.03
            assert first.phases_s["pause.agree"] == 0.01
            assert first.phases_s["prepare"] >= 0.5
            # The preparation takes half a second, and a report comes at each step.
            assert first.steps_during_s == (0.05,) * 10
            assert sum(first.experts_per_worker) == 16
            assert len(first.released) == len(first.old_members) - len(first.new_members)
            assert all(slot.removed_at > slot.decided_at for slot in first.released)
            assert status.usage.freed_worker_s > 0
            assert status.usage.peak_slots == 4
            assert status.usage.occupied_worker_steps < 4 * status.usage.steps
            assert status.usage.steps >= max(TAIL), "steps of the last report were not counted"
            await check_usage_adds_up(coordinator, "r")

    run(main())


def test_samples_of_a_leaver_move_and_go_on_with_the_same_tokens() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            results = await all_results(coordinator, "r")
            moved = [result for result in results if len(result.worker_ids) > 1]
            assert moved, "nothing moved: the test shows nothing"
            check_tokens(results, TAIL)
            listed = {s for op in await coordinator.operations() for s in op.moved_samples}
            assert {result.sample_id for result in moved} <= listed
            assert (await coordinator.status(RolloutId("r"))).num_moved == len(moved)

    run(main())


def test_a_static_rollout_keeps_everybody_and_its_chunks() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL, strategy=Strategy.STATIC))
            results = await all_results(coordinator, "r")
            check_tokens(results, TAIL)
            assert [result.worker_ids[0] for result in results] == sorted([0, 1, 2, 3] * 4)
            usage = (await coordinator.status(RolloutId("r"))).usage
            assert usage.freed_worker_s == 0
            assert usage.occupied_worker_steps == 4 * usage.steps
            assert await coordinator.operations() == []

    run(main())


def test_two_rollouts_at_once_both_end_and_split_the_workers_between_them() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("one", TAIL))
            await coordinator.submit(make_request("two", TAIL, seed=8))
            one, two = await asyncio.gather(
                all_results(coordinator, "one"), all_results(coordinator, "two")
            )
            check_tokens(one, TAIL)
            check_tokens(two, TAIL)
            assert one[0].seed != two[0].seed
            for rollout_id in ("one", "two"):
                await check_usage_adds_up(coordinator, rollout_id)
                usage = (await coordinator.status(RolloutId(rollout_id))).usage
                assert usage.shared_worker_s > 0

    run(main())


def test_more_samples_than_slots_wait_in_arrival_order() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            lengths = [20] * 40
            await coordinator.submit(make_request("r", lengths))
            results = await all_results(coordinator, "r")
            check_tokens(results, lengths)
            assert world.factory.peak_running == 16
            assert results[0].queued_s < 1 < results[39].queued_s

    run(main())


def test_the_same_request_joins_and_another_with_its_id_is_refused() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            request = make_request("r", TAIL)
            await coordinator.submit(request)
            again = await coordinator.submit(request)
            assert again.num_samples == len(TAIL)
            with pytest.raises(RequestError) as refused:
                await coordinator.submit(make_request("r", TAIL, seed=9))
            assert refused.value.field == "rollout_id"
            check_tokens(await all_results(coordinator, "r"), TAIL)

    run(main())


def test_an_abort_answers_with_partials_and_frees_the_workers() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", [140] * 20))
            await asyncio.sleep(2.0)
            batch = await coordinator.abort(RolloutId("r"))
            assert batch.done
            assert len(batch.samples) == 20
            assert {sample.finish_reason for sample in batch.samples} == {FinishReason.ABORT}
            partials = [sample for sample in batch.samples if sample.token_ids]
            assert len(partials) == 16
            for sample in partials:
                num_tokens = len(sample.token_ids)
                assert sample.token_ids == expected_response(sample.seed, 3, num_tokens)
            status = await coordinator.status(RolloutId("r"))
            assert status.state is RolloutState.ABORTED
            assert not any(worker.samples for worker in world.factory.workers.values())
            await coordinator.submit(make_request("next", TAIL))
            check_tokens(await all_results(coordinator, "next"), TAIL)

    run(main())


def test_an_abort_of_some_samples_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [60, 140, 60]))
            await asyncio.sleep(1.0)
            batch = await coordinator.abort(RolloutId("r"), (SampleId("r/1/0"),))
            assert [s.finish_reason for s in batch.samples] == [FinishReason.ABORT]
            assert not batch.done
            results = await all_results(coordinator, "r")
            check_tokens([results[0], results[2]], [60, 60])
            assert 0 < len(results[1].token_ids) < 140
            assert (await coordinator.status(RolloutId("r"))).state is RolloutState.FINISHED

    run(main())


def test_tokens_come_as_they_are_decoded_and_make_up_the_whole_response() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [30, 60]))
            heard: list[list[int]] = [[], []]
            known: list[int | None] = [0, 0]
            polls = 0
            while any(count is not None for count in known):
                news = await coordinator.tokens(RolloutId("r"), tuple(known), 30.0)
                assert news, "an open rollout that grows has news"
                polls += 1
                for told in news:
                    index = told.prompt_index
                    assert told.start == len(heard[index]) == known[index]
                    assert len(told.token_ids) == len(told.logprobs)
                    heard[index] += told.token_ids
                    known[index] = None if told.finish_reason else len(heard[index])
            assert polls > 10
            results = await all_results(coordinator, "r")
            assert [tuple(ids) for ids in heard] == [result.token_ids for result in results]
            assert await coordinator.tokens(RolloutId("r"), (None, None), 30.0) == ()

    run(main())


@pytest.mark.parametrize("known", [(), (0, 0), (-1,)])
def test_a_count_per_sample_is_what_tokens_are_asked_by(known: tuple[int, ...]) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [5]))
            with pytest.raises(RequestError) as refused:
                await coordinator.tokens(RolloutId("r"), known, 1.0)
            assert refused.value.field == "known"

    run(main())


def test_a_batch_that_comes_as_a_rollout_per_sample_releases_workers_too() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            for index, length in enumerate(TAIL):
                await coordinator.submit(make_request(f"r{index}", [length]))
            for index, length in enumerate(TAIL):
                check_tokens(await all_results(coordinator, f"r{index}"), [length])
            released = [op for op in await coordinator.operations() if op.released]
            assert released
            assert all(0 < op.finished_ratio_at_start < 1 for op in released)

    run(main())


def test_open_rollouts_are_listed_until_they_end() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("a", [5]))
            await coordinator.submit(make_request("b", [50]))
            assert [r.rollout_id for r in await coordinator.open_rollouts()] == ["a", "b"]
            await all_results(coordinator, "a")
            assert [r.rollout_id for r in await coordinator.open_rollouts()] == ["b"]
            await all_results(coordinator, "b")
            assert await coordinator.open_rollouts() == []

    run(main())


def test_results_wait_for_the_first_ending_and_no_longer_than_asked() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [100]))
            none_yet = await coordinator.results(RolloutId("r"), 0, 0.5, 10)
            assert none_yet.samples == ()
            assert not none_yet.done
            batch = await coordinator.results(RolloutId("r"), 0, 60.0, 10)
            assert len(batch.samples) == 1
            assert batch.done
            with pytest.raises(UnknownIdError):
                await coordinator.results(RolloutId("unknown"), 0, 0.0, 1)

    run(main())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompts": ((1,), ())}, "prompts[1]"),
        ({"prompts": ((1,), (100,))}, "prompts[1]"),
        ({"prompts": ((1,), (1,) * 60)}, "prompts[1]"),
        ({"num_samples": 0}, "num_samples"),
        ({"prompts": ()}, "prompts"),
        ({"samplings": (Sampling(1),) * 3}, "samplings"),
        ({"samplings": (Sampling(0),)}, "samplings[0].max_tokens"),
        ({"samplings": (Sampling(9, temperature=-1.0),)}, "samplings[0].temperature"),
        ({"samplings": (Sampling(9, temperature=math.nan),)}, "samplings[0].temperature"),
        ({"samplings": (Sampling(9, top_p=0.0),)}, "samplings[0].top_p"),
        ({"samplings": (Sampling(9, top_k=-1),)}, "samplings[0].top_k"),
        ({"samplings": (Sampling(9, stop_token_ids=(100,)),)}, "samplings[0].stop_token_ids"),
        ({"replay_stop_tokens": ((1,),)}, "replay_stop_tokens"),
        ({"replay_stop_tokens": ((1,), (151,))}, "replay_stop_tokens[1][0]"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field(
    change: dict[str, object], field: str
) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            with pytest.raises(RequestError) as refused:
                await coordinator.submit(replace(make_request("r", [5, 5]), **change))
            assert refused.value.field == field
            with pytest.raises(UnknownIdError):
                await coordinator.status(RolloutId("r"))

    run(main())


def test_a_prompt_that_is_too_long_is_told_the_limit_and_both_counts() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            request = replace(make_request("r", [5]), prompts=((1,) * 60,))
            with pytest.raises(RequestError, match=r"60 tokens.*150.*at most 200"):
                await coordinator.submit(request)

    run(main())


def test_more_samples_than_may_be_open_are_refused_and_accepted_later() -> None:
    async def main() -> None:
        async with started(World(), make_settings(max_open_samples=20)) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            with pytest.raises(OverloadedError, match="max_open_samples = 20"):
                await coordinator.submit(make_request("s", TAIL))
            await all_results(coordinator, "r")
            await coordinator.submit(make_request("s", TAIL))
            check_tokens(await all_results(coordinator, "s"), TAIL)

    run(main())


def test_shutdown_ends_open_samples_once_and_refuses_new_ones() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", [140] * 4))
            await asyncio.sleep(1.0)
            reading = asyncio.ensure_future(all_results(coordinator, "r"))
            await asyncio.gather(coordinator.shutdown(), coordinator.shutdown())
            results = await reading
            assert {result.finish_reason for result in results} == {FinishReason.ABORT}
            assert world.is_clean()
            with pytest.raises(UnavailableError):
                await coordinator.submit(make_request("s", TAIL))

    run(main())


def test_metrics_and_workers_tell_what_is_going_on() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            await asyncio.sleep(0.5)
            workers = await coordinator.workers()
            assert [worker.state for worker in workers] == ["decoding"] * 4
            assert [worker.rank for worker in workers] == [0, 1, 2, 3]
            assert sorted(e for worker in workers for e in worker.experts) == list(range(16))
            assert all(worker.slot.startswith("GPU:") for worker in workers)
            await all_results(coordinator, "r")
            text = (await coordinator.metrics_text()).decode()
            assert f"flexfloor_tokens_total {sum(TAIL)}.0" in text
            assert 'flexfloor_ended_samples_total{reason="stop"} 16.0' in text
            assert 'flexfloor_released_workers_total{reason="consolidate"}' in text
            assert 'flexfloor_change_phase_seconds_count{phase="prepare"}' in text

    run(main())


def test_health_is_lost_when_steps_stop_and_says_since_when() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            assert (await coordinator.health()).healthy
            await coordinator.submit(make_request("r", [140] * 4))
            await asyncio.sleep(2.0)
            assert (await coordinator.health()).healthy
            world.factory.frozen = True
            await asyncio.sleep(40.0)
            health = await coordinator.health()
            assert not health.healthy
            assert health.last_step_age_s > 30
            assert "bound 30" in health.detail
            world.factory.frozen = False
            await asyncio.sleep(1.0)
            assert (await coordinator.health()).healthy

    run(main())


def test_the_store_hears_a_heartbeat_three_times_per_reaper_bound() -> None:
    async def main() -> None:
        world = World()
        async with started(world):
            before = world.store.heartbeats
            await asyncio.sleep(60.0)
            assert world.store.heartbeats - before == 3

    run(main())


def test_slots_that_others_take_count_as_used_from_when_they_hold_them() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            await until(lambda: len(world.leases.leases) < 4, "a release")
            world.leases.borrow("a", 1)
            await all_results(coordinator, "r")
            usage = (await coordinator.status(RolloutId("r"))).usage
            assert 0 < usage.used_worker_s < usage.freed_worker_s
            await check_usage_adds_up(coordinator, "r")
            world.leases.borrow("a", -1)

    run(main())
