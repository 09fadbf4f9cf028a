"""What a caller may ask of a rollout beside its samples: who goes first, when it is over, how many
are enough, where samples begin, and where a reader goes on."""

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from actors.journal import MemoryJournal
from actors.rollout_api import (
    CancelledBy,
    RolloutRequest,
    RolloutState,
    SampleNews,
    SampleResult,
    SampleStart,
    Strategy,
)
from actors.settings import PlanningSettings
from placement.errors import RequestError
from placement.ids import RolloutId
from placement.samples import FinishReason, Sampling
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    make_request,
    make_settings,
    started,
)
from tests.unit.fake_cluster import STEP_S, expected_response
from tests.unit.virtual_time import clock, run, until

R = RolloutId("r")


def grouped(lengths: list[list[int]], num_wanted: int | None, **terms: object) -> RolloutRequest:
    """A prompt per row; its samples have these lengths."""
    request = RolloutRequest(
        rollout_id=R,
        prompts=tuple((1, 2, 3 + index) for index in range(len(lengths))),
        num_samples=len(lengths[0]),
        samplings=(Sampling(max_tokens=150),),
        seed=7,
        replay_stop_tokens=tuple(tuple(row) for row in lengths),
        num_wanted=num_wanted,
    )
    return replace(request, **terms)


def by_prompt(results: list[SampleResult]) -> dict[int, list[SampleResult]]:
    groups: dict[int, list[SampleResult]] = defaultdict(list)
    for result in results:
        groups[result.prompt_index].append(result)
    return groups


# Priorities


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("elastic", "first_rule"), ("elastic", "planner"), ("static", "planner")],
)
def test_a_higher_priority_starts_before_all_that_wait(strategy: str, policy: str) -> None:
    async def main() -> None:
        settings = make_settings(max_workers=1, max_samples_per_worker=2).model_copy(
            update={"planning": PlanningSettings.model_validate({"policy": policy})}
        )
        async with started(World(1), settings) as coordinator:
            low = make_request("low", [20] * 8, strategy=Strategy(strategy))
            high = make_request("high", [20] * 4, strategy=Strategy(strategy))
            await coordinator.submit(low)
            await asyncio.sleep(STEP_S)  # two of them decode
            await coordinator.submit(replace(high, priority=1))
            before, first = await asyncio.gather(
                all_results(coordinator, "low"), all_results(coordinator, "high")
            )
            check_tokens(before + first, [20] * 12)
            waited_s = [result.queued_s for result in before]
            assert max(result.queued_s for result in first) < sorted(waited_s)[2]
            if policy == "first_rule":  # the planner sends a scout of each prompt ahead
                assert waited_s == sorted(waited_s), "within a priority the order is arrival"
            assert (await coordinator.status(RolloutId("high"))).priority == 1

    run(main())


# Deadlines


def test_what_is_unfinished_at_the_deadline_ends_with_its_partial_and_says_why() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            accepted_at = clock()
            lengths = [20] + [150] * 19
            await coordinator.submit(replace(make_request("r", lengths), deadline_s=3.0))
            results = await all_results(coordinator, "r")
            assert 3.0 <= clock() - accepted_at < 3.5
            assert results[0].finish_reason is FinishReason.STOP
            assert results[0].cancelled_by is None
            partials = results[1:]
            assert {r.finish_reason for r in partials} == {FinishReason.ABORT}
            assert {r.cancelled_by for r in partials} == {CancelledBy.DEADLINE}
            assert {r.error for r in partials} == {"deadline_s = 3 s were over"}
            for result in results:
                assert result.token_ids == expected_response(result.seed, 3, len(result.token_ids))
            assert sum(len(result.token_ids) > 30 for result in partials) == 16
            assert not any(worker.samples for worker in world.factory.workers.values())
            status = await coordinator.status(R)
            assert status.state is RolloutState.ABORTED
            assert status.deadline_at == status.accepted_at + 3.0

    run(main())


def test_a_rollout_that_ends_in_time_leaves_no_timer_behind() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(replace(make_request("r", [5]), deadline_s=1000.0))
            check_tokens(await all_results(coordinator, "r"), [5])
            await coordinator.submit(make_request("s", [5]))
            scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            due_s = [t.when() - clock() for t in scheduled if not t.cancelled()]
            assert not [after_s for after_s in due_s if 500 < after_s < 1500]

    run(main())


def test_a_deadline_outlives_the_coordinator_that_accepted_it() -> None:
    async def main() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        accepted_at = clock()
        await first.submit(replace(make_request("r", [150] * 4), deadline_s=5.0))
        await asyncio.sleep(2.0)
        await world.coordinator_dies()
        async with started(world, journal=journal) as second:
            results = await all_results(second, "r")
            assert 5.0 <= clock() - accepted_at < 5.5
            assert {r.cancelled_by for r in results} == {CancelledBy.DEADLINE}

    run(main())


# Oversampling


def test_when_enough_of_a_prompt_have_finished_the_others_are_cancelled() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            lengths = [[10, 20, 90, 140], [140, 12, 30, 145]]
            await coordinator.submit(grouped(lengths, 2))
            groups = by_prompt(await all_results(coordinator, "r"))
            for index, row in enumerate(lengths):
                wanted = set(sorted(row)[:2])
                for result, length in zip(groups[index], row, strict=True):
                    count = len(result.token_ids)
                    assert result.token_ids == expected_response(result.seed, 3, count)
                    if length in wanted:
                        assert (result.finish_reason, count) == (FinishReason.STOP, length)
                        assert result.cancelled_by is None
                    else:
                        assert result.finish_reason is FinishReason.ABORT
                        assert result.cancelled_by is CancelledBy.OVERSAMPLING
                        assert 0 < count < length
            assert (await coordinator.status(R)).state is RolloutState.FINISHED
            await until(
                lambda: not any(w.samples for w in world.factory.workers.values()),
                "no worker decodes for nobody",
            )

    run(main())


def test_those_that_finish_in_the_same_step_are_no_more_than_are_wanted() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(grouped([[30] * 4] * 3, 1))
            for results in by_prompt(await all_results(coordinator, "r")).values():
                reasons = Counter(result.finish_reason for result in results)
                assert reasons == {FinishReason.STOP: 1, FinishReason.ABORT: 3}

    run(main())


def test_one_that_waits_for_a_slot_is_cancelled_without_a_token() -> None:
    async def main() -> None:
        settings = make_settings(max_workers=1, max_samples_per_worker=1)
        async with started(World(1), settings) as coordinator:
            await coordinator.submit(grouped([[10, 10, 10]], 1))
            results = await all_results(coordinator, "r")
            assert [len(result.token_ids) for result in results] == [10, 0, 0]
            assert [r.cancelled_by for r in results[1:]] == [CancelledBy.OVERSAMPLING] * 2

    run(main())


def test_a_coordinator_that_died_between_the_last_wanted_and_the_others_ends_them() -> None:
    async def main() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(grouped([[10, 140, 140]], None))
        await until(lambda: len(world.factory.living()) == 4, "all workers are there")
        assert len((await first.results(R, 0, 60.0, 1)).samples) == 1
        await world.coordinator_dies()
        # The journal of one that wanted one sample, as far as its ending.
        ((_, entries),) = journal._entries_of.items()
        entries[0] = replace(entries[0], request=grouped([[10, 140, 140]], 1))  # type: ignore[arg-type]
        async with started(world, journal=journal) as second:
            results = await all_results(second, "r")
            assert [r.cancelled_by for r in results] == [None] + [CancelledBy.OVERSAMPLING] * 2

    run(main())


# Partials that go on


def test_a_partial_goes_on_where_it_was_with_the_same_noise_and_within_its_budget() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [60, 140]))
            await asyncio.sleep(1.5)
            await coordinator.abort(R)
            partials = await all_results(coordinator, "r")
            assert all(0 < len(partial.token_ids) < 60 for partial in partials)
            again = replace(
                make_request("again", [60, 140], seed=99),
                starts=tuple(SampleStart(p.token_ids, p.seed) for p in partials),
            )
            await coordinator.submit(again)
            rests = await all_results(coordinator, "again")
            for partial, rest, length in zip(partials, rests, [60, 140], strict=True):
                assert rest.start == len(partial.token_ids)
                whole = partial.token_ids + rest.token_ids
                assert whole == expected_response(partial.seed, 3, length)
                assert len(rest.logprobs) == len(rest.token_ids)
                assert rest.finish_reason is FinishReason.STOP
            status = await coordinator.status(RolloutId("again"))
            assert status.response_tokens == sum(len(rest.token_ids) for rest in rests)

    run(main())


def test_all_resumes_together_stay_within_max_tokens() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            request = replace(
                make_request("r", [1]),
                samplings=(Sampling(max_tokens=40),),
                replay_stop_tokens=None,
                starts=(SampleStart(expected_response(5, 3, 30), seed=5),),
            )
            await coordinator.submit(request)
            (result,) = await all_results(coordinator, "r")
            assert result.finish_reason is FinishReason.LENGTH
            assert expected_response(5, 3, 40)[30:] == result.token_ids

    run(main())


def test_a_partial_that_goes_on_is_streamed_from_its_first_new_token() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            start = SampleStart(expected_response(5, 3, 30), seed=5)
            await coordinator.submit(replace(make_request("r", [60]), starts=(start,)))
            (news,) = await coordinator.tokens(R, (0,), 30.0)
            assert news.start == 30
            assert news.token_ids == expected_response(5, 3, 60)[30 : 30 + len(news.logprobs)]

    run(main())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"starts": ()}, "starts"),
        ({"starts": (SampleStart((5,) * 150), SampleStart())}, "starts[0].generated_ids"),
        ({"starts": (SampleStart(), SampleStart((100,)))}, "starts[1].generated_ids"),
        ({"starts": (SampleStart((7, 1)), SampleStart())}, "starts[0].generated_ids"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"num_wanted": 2}, "num_wanted"),
        ({"num_wanted": 0}, "num_wanted"),
        (
            {
                "starts": (SampleStart((5,) * 9), SampleStart()),
                "replay_stop_tokens": ((9,), (9,)),
            },
            "replay_stop_tokens[0][0]",
        ),
    ],
)
def test_terms_that_cannot_be_kept_are_refused_by_field(
    change: dict[str, object], field: str
) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            with pytest.raises(RequestError) as refused:
                await coordinator.submit(replace(make_request("r", [20, 20]), **change))
            assert refused.value.field == field

    run(main())


# Readers that come back


def heard(responses: dict[int, list[int]], news: tuple[SampleNews, ...]) -> int:
    """Take the news down; returns how many samples ended with them."""
    for told in news:
        assert told.start == len(responses[told.prompt_index]), "a gap, or something twice"
        assert len(told.token_ids) == len(told.logprobs)
        responses[told.prompt_index] += told.token_ids
    return sum(told.finish_reason is not None for told in news)


@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_whoever_reads_on_from_a_cursor_gets_every_token_and_every_ending_once(limit: int) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            lengths = [5, 30, 60, 140, 20, 25]
            await coordinator.submit(make_request("r", lengths))
            responses: dict[int, list[int]] = defaultdict(list)
            cursor, ended, done = 0, 0, False
            while not done:
                # The answer to this one is lost on its way, and asked for again.
                await coordinator.new_tokens(R, cursor, 30.0, limit)
                batch = await coordinator.new_tokens(R, cursor, 30.0, limit)
                ended += heard(responses, batch.news)
                cursor, done = batch.cursor, batch.done
            assert ended == len(lengths)
            results = await all_results(coordinator, "r")
            assert [tuple(responses[i]) for i in range(6)] == [r.token_ids for r in results]
            again: dict[int, list[int]] = defaultdict(list)
            batch = await coordinator.new_tokens(R, 0, 0.0, 1 << 20)
            assert heard(again, batch.news) == len(lengths)
            assert again == responses

    run(main())


def test_a_cursor_is_good_across_a_restart_of_the_coordinator() -> None:
    async def main() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(make_request("r", [60, 90]))
        responses: dict[int, list[int]] = defaultdict(list)
        cursor = ended = 0
        while len(responses[1]) < 20:
            batch = await first.new_tokens(R, cursor, 30.0, 3)
            ended += heard(responses, batch.news)
            cursor = batch.cursor
        await world.coordinator_dies()
        async with started(world, journal=journal) as second:
            done = False
            while not done:
                batch = await second.new_tokens(R, cursor, 30.0, 3)
                ended += heard(responses, batch.news)
                cursor, done = batch.cursor, batch.done
            results = await all_results(second, "r")
            assert [tuple(responses[i]) for i in range(2)] == [r.token_ids for r in results]
            assert ended == 2

    run(main())


@pytest.mark.parametrize("cursor", [-1, 1000])
def test_a_cursor_that_nobody_has_handed_out_is_refused(cursor: int) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [5]))
            for read in (coordinator.new_tokens, coordinator.results):
                with pytest.raises(RequestError) as refused:
                    await read(R, cursor, 1.0, 10)
                assert refused.value.field == "cursor"

    run(main())
