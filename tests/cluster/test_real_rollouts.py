"""Rollouts on workers that host vLLM: what clients and other jobs get of them."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from actors.rollout_api import RolloutState, SampleResult, Strategy
from placement.ids import RolloutId
from placement.membership import Phase
from placement.samples import FinishReason
from tests.cluster.real_runtime import RealRuntime, assert_same, batch, until
from tests.cluster.started_job import other_job

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

TAIL = (8, 8, 8, 8, 8, 8, 8, 1000)
"""One sample that goes on for long behind all others."""


async def test_a_rollout_that_shrinks_and_moves_samples_gives_what_a_static_one_gives(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    assert {len(sample.worker_ids) for sample in reference} == {1}, "a static rollout moves nobody"
    assert len(Counter(sample.worker_ids for sample in reference)) == 4
    await real_runtime.whole()
    results = await real_runtime.decode(batch("elastic"))
    assert_same(results, reference)
    moved = [sample for sample in results if len(sample.worker_ids) > 1]
    assert moved
    status = await real_runtime.client.status(RolloutId("elastic"))
    assert status.num_moved == len(moved)
    assert status.usage.freed_worker_s > 0
    assert status.usage.steps >= max(len(sample.token_ids) for sample in results)
    releases = [o for o in await real_runtime.client.operations() if o.released]
    assert all(release.phase is Phase.DONE for release in releases)
    assert any(release.steps_during_s for release in releases), "decoding goes on beside it"


async def test_a_waiting_actor_of_another_job_gets_the_freed_slot_before_the_rollout_ends(
    real_runtime: RealRuntime, record_property: Any
) -> None:
    await real_runtime.whole()
    with other_job(real_runtime.address) as job:
        assert await asyncio.to_thread(job.next_line) == {"waiting": True}
        await real_runtime.client.submit(batch("lending", TAIL))
        borrowed = await asyncio.to_thread(job.next_line)
        status = await real_runtime.client.status(RolloutId("lending"))
        assert status.state is RolloutState.RUNNING
        operations = await real_runtime.client.operations()
        released = [slot for operation in operations for slot in operation.released]
        (slot,) = (s for s in released[-3:] if s.slot == f"GPU:{borrowed['slot']}")
        assert slot.removed_at <= borrowed["started_at"] <= time.time()
        record_property("release_to_running_s", borrowed["started_at"] - slot.removed_at)
        record_property("decision_to_running_s", borrowed["started_at"] - slot.decided_at)

        async def counted() -> bool:
            usage = (await real_runtime.client.status(RolloutId("lending"))).usage
            return 0 < usage.used_worker_s <= usage.freed_worker_s

        await until(counted, 10, "used time of the freed slot")
        await real_runtime.client.abort(RolloutId("lending"))


async def test_two_rollouts_at_once_get_what_each_gets_alone(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    other = (30, 12, 90, 18, 45, 24)
    alone = await real_runtime.decode(batch("alone", other, seed=23))
    await real_runtime.client.submit(batch("first of two"))
    await real_runtime.client.submit(batch("second of two", other, seed=23))
    first, second = await asyncio.gather(
        real_runtime.results("first of two"), real_runtime.results("second of two")
    )
    assert_same(first, reference)
    assert_same(second, alone)
    one, two = [
        await real_runtime.client.status(RolloutId(name))
        for name in ("first of two", "second of two")
    ]
    assert two.accepted_at < (one.ended_at or 0)
    assert {one.state, two.state} == {RolloutState.FINISHED}
    assert min(one.usage.shared_worker_s, two.usage.shared_worker_s) > 0


async def test_an_abort_gives_partials_and_frees_the_kv_within_a_few_steps(
    real_runtime: RealRuntime, record_property: Any
) -> None:
    client = real_runtime.client
    await client.submit(batch("cut", (900,) * 8))
    await real_runtime.decoding("cut", 8 * 10)

    async def kv_in_use() -> bool:
        return sum(w.kv_used_tokens for w in await client.workers()) >= 8 * 10

    await until(kv_in_use, 10, "KV of eight samples")
    before = (await client.status(RolloutId("cut"))).response_tokens
    answer = await client.abort(RolloutId("cut"))
    assert answer.done
    assert [s.finish_reason for s in answer.samples] == [FinishReason.ABORT] * 8
    partials = [len(s.token_ids) for s in answer.samples]
    assert all(10 <= len(s.token_ids) == len(s.logprobs) < 900 for s in answer.samples)
    steps = max(partials) - before // 8
    record_property("steps_until_let_go", steps)
    assert steps < 60  # what is known before the abort is a tenth of a second old

    async def kv_free() -> bool:
        return not any(w.kv_used_tokens or w.running for w in await client.workers())

    await until(kv_free, 3, "all KV free")
    status = await client.status(RolloutId("cut"))
    assert (status.state, status.num_ended) == (RolloutState.ABORTED, 8)


async def test_a_static_rollout_waits_for_the_whole_group_and_releases_nobody(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    before = len(await real_runtime.client.operations())
    results = await real_runtime.decode(batch("static again", strategy=Strategy.STATIC))
    assert_same(results, reference)
    later = (await real_runtime.client.operations())[before:]
    status = await real_runtime.client.status(RolloutId("static again"))
    during = [o for o in later if status.accepted_at < o.started_at < (status.ended_at or 0)]
    assert all(o.phase is Phase.DONE and not o.released for o in during)
    assert status.usage.peak_slots == 4
