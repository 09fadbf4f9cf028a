"""Pause, sleep and waking on workers that host vLLM: nobody's tokens change, and asleep Ray has
every slot back."""

import asyncio

import pytest

from actors.control_api import DiskWeights, PauseMode, ServingState, WeightUpdate
from actors.ray_tables import read_groups
from actors.rollout_api import SampleResult
from placement.ids import RolloutId
from placement.samples import FinishReason
from tests.cluster.real_runtime import (
    NUM_WORKERS,
    RealRuntime,
    assert_same,
    batch,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

PAUSE_BOUND_S = 60.0
WAKE_BOUND_S = 400.0
"""Four engines are built at once; each build has ``group.build_timeout_s``."""
STILL_S = 1.0


async def tokens_of(runtime: RealRuntime, name: str) -> int:
    return (await runtime.client.status(RolloutId(name))).response_tokens


async def pause(runtime: RealRuntime, mode: PauseMode) -> None:
    status = await runtime.client.pause(mode, PAUSE_BOUND_S)
    assert (status.state, status.mode) == (ServingState.PAUSED, mode), status


def leases(runtime: RealRuntime) -> list[str]:
    """As Ray's tables say."""
    return [row.name for row in read_groups("") if row.state == "CREATED"]


async def test_samples_that_are_kept_go_on_as_if_nothing_had_been(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    client = real_runtime.client
    await client.submit(batch("kept"))
    await real_runtime.decoding("kept", 100)
    await pause(real_runtime, PauseMode.KEEP)
    await asyncio.sleep(STILL_S)  # what was made before is told by now
    before = await tokens_of(real_runtime, "kept")
    operations = len(await client.operations())
    await client.submit(batch("later", (8, 8)))
    await asyncio.sleep(STILL_S)
    assert await tokens_of(real_runtime, "kept") == before
    assert await tokens_of(real_runtime, "later") == 0
    assert len(await client.operations()) == operations
    assert (await client.health()).healthy
    await client.resume()
    assert_same(await real_runtime.results("kept"), reference)
    assert [len(s.token_ids) for s in await real_runtime.results("later")] == [8, 8]


async def test_whoever_is_aborted_is_answered_with_what_there_is(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    await real_runtime.whole()
    await real_runtime.client.submit(batch("aborted"))
    await real_runtime.decoding("aborted", 60)
    answer = asyncio.create_task(real_runtime.results("aborted"))
    await pause(real_runtime, PauseMode.ABORT)
    results = await asyncio.wait_for(answer, PAUSE_BOUND_S)
    aborted = [r for r in results if r.finish_reason is FinishReason.ABORT]
    assert aborted
    for result, expected in zip(results, reference, strict=True):
        length = len(result.token_ids)  # none, if it had not begun
        assert result.token_ids == expected.token_ids[:length]
        assert result.logprobs == expected.logprobs[:length]
    await real_runtime.client.resume()


async def test_asleep_ray_has_every_slot_back_and_awake_kept_samples_go_on(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    client = real_runtime.client
    await real_runtime.whole()
    assert len(leases(real_runtime)) == NUM_WORKERS
    await client.submit(batch("slept"))
    await real_runtime.decoding("slept", 60)
    status = await client.sleep(PauseMode.KEEP, PAUSE_BOUND_S)
    assert status.state is ServingState.ASLEEP
    assert leases(real_runtime) == []
    assert await client.workers() == []
    assert (await client.health()).healthy
    status = await client.wake(WAKE_BOUND_S)
    assert status.state is ServingState.SERVING, status
    assert_same(await real_runtime.results("slept"), reference)
    usage = (await client.status(RolloutId("slept"))).usage
    parts_s = usage.occupied_worker_s + usage.freed_worker_s + usage.not_yet_leased_worker_s
    assert abs(parts_s + usage.shared_worker_s - usage.peak_slots * usage.span_s) < 1e-6
    assert usage.freed_worker_s > 0


async def test_weights_that_come_during_a_pause_leave_it_a_pause(
    real_runtime: RealRuntime, reference: list[SampleResult], model: str
) -> None:
    """The checkpoint's own under another name: so what was kept is to go on unchanged."""
    client = real_runtime.client
    await real_runtime.whole()
    await client.submit(batch("updated"))
    await real_runtime.decoding("updated", 100)
    await pause(real_runtime, PauseMode.KEEP)
    status = await client.update_weights(WeightUpdate(DiskWeights(model), "again"))
    assert status.version == "again"
    await asyncio.sleep(STILL_S)
    before = await tokens_of(real_runtime, "updated")
    await asyncio.sleep(STILL_S)
    assert await tokens_of(real_runtime, "updated") == before
    assert (await client.pause_status()).state is ServingState.PAUSED
    await client.resume()
    results = await real_runtime.results("updated")
    assert_same(results, reference)
    assert {result.weight_version for result in results} == {"again"}
