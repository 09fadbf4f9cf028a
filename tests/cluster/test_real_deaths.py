"""Processes that are killed, around workers that host vLLM: no sample and no token is lost."""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from actors.rollout_api import OperationStatus, RolloutState, SampleResult
from placement.ids import RolloutId
from placement.membership import Phase
from tests.cluster.real_runtime import (
    NUM_WORKERS,
    ROLLOUT_BOUND_S,
    RealRuntime,
    assert_same,
    batch,
    kill,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

TRIES = 3


async def growing(runtime: RealRuntime) -> OperationStatus:
    """A growth that has begun: behind a rollout with a tail, the group takes its slots back."""
    await runtime.whole()
    await runtime.decode(batch(f"tail before {len(await runtime.client.operations())}"))
    return await runtime.growth()


async def test_a_killed_coordinator_comes_back_to_its_living_workers_and_serves(
    real_runtime: RealRuntime, reference: list[SampleResult], record_property: Any
) -> None:
    await real_runtime.whole()
    before = await real_runtime.member_pids()
    record_property("back_after_s", await real_runtime.kill_coordinator())
    assert await real_runtime.member_pids() == before
    assert_same(await real_runtime.decode(batch("after its coordinator")), reference)


async def test_a_joiner_that_is_killed_while_it_builds_costs_nothing_and_the_next_try_succeeds(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    growth = await growing(real_runtime)
    await real_runtime.client.submit(batch("beside a build"))
    await real_runtime.decoding("beside a build", 100)
    change = await real_runtime.change()
    assert change is not None
    assert (change.generation, change.phase) == (growth.generation, Phase.BUILD)
    joiner = next(w for w in growth.new_members if w not in growth.old_members)
    kill(await real_runtime.joiner_pid(joiner))
    failed = await real_runtime.ended(growth)
    assert failed.phase is Phase.ROLLED_BACK
    assert f"worker-{joiner}" in failed.error
    assert_same(await real_runtime.results("beside a build"), reference)
    await real_runtime.whole()


async def test_a_joiner_that_is_killed_while_it_prepares_costs_nothing(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    growth, joiner_pid = await stopped_in_preparation(real_runtime, "beside a preparation")
    kill(joiner_pid)
    failed = await real_runtime.ended(growth)
    assert failed.phase is Phase.ROLLED_BACK
    assert Phase.PAUSE not in failed.phases_s
    assert_same(await real_runtime.results("beside a preparation"), reference)
    await real_runtime.whole()


async def test_a_joiner_that_is_killed_while_it_crosses_over_costs_no_token(
    real_runtime: RealRuntime, reference: list[SampleResult], record_property: Any
) -> None:
    """A crossing takes some hundredths of a second: more than one may be needed to hit it."""
    for attempt in range(TRIES):
        name = f"beside a crossing {attempt}"
        _, joiner_pid = await stopped_in_preparation(real_runtime, name)
        os.kill(joiner_pid, signal.SIGCONT)
        phase = await first_phase_behind(real_runtime, Phase.PREPARE)
        kill(joiner_pid)
        assert_same(await real_runtime.results(name), reference)
        await real_runtime.whole()
        if phase in (Phase.PAUSE, Phase.COMMIT):
            record_property("killed_in", f"{phase}, try {attempt + 1}")
            return
    pytest.fail(f"no crossing was hit in {TRIES} growths")


async def stopped_in_preparation(runtime: RealRuntime, name: str) -> tuple[OperationStatus, int]:
    """A growth whose preparation cannot end, because a joiner is stopped (its pid), while the
    rollout ``name`` decodes."""
    growth = await growing(runtime)
    joiner_pid = await a_built_joiner(runtime, growth)
    os.kill(joiner_pid, signal.SIGSTOP)
    assert await first_phase_behind(runtime, Phase.BUILD) is Phase.PREPARE
    await runtime.client.submit(batch(name))
    await runtime.decoding(name, 100)
    return growth, joiner_pid


async def a_built_joiner(runtime: RealRuntime, growth: OperationStatus) -> int:
    """The process of the first joiner that has been built; others still are."""

    async def built() -> int | None:
        change = await runtime.change()
        assert change is not None
        assert change.phase is Phase.BUILD, "all joiners were built within one look"
        joiners = [w for w in await runtime.client.workers() if w.rank is None and w.pid]
        return joiners[0].pid if joiners else None

    return await until(built, ROLLOUT_BOUND_S, f"a built one of {growth.new_members}")


async def first_phase_behind(runtime: RealRuntime, phase: Phase) -> Phase:
    """Looked at without a pause; the phases are shorter than it would be."""
    async with asyncio.timeout(ROLLOUT_BOUND_S):
        while (change := await runtime.change()) is not None:
            if change.phase is not phase:
                return change.phase
    return Phase.DONE


async def test_a_member_that_is_killed_while_it_decodes_costs_no_token(
    real_runtime: RealRuntime, reference: list[SampleResult], record_property: Any
) -> None:
    await real_runtime.whole()
    before = await real_runtime.member_pids()
    await real_runtime.client.submit(batch("beside a member"))
    await real_runtime.decoding("beside a member", NUM_WORKERS)
    kill(before[1])
    results = await real_runtime.results("beside a member")
    assert_same(results, reference)
    status = await real_runtime.client.status(RolloutId("beside a member"))
    assert status.state is RolloutState.FINISHED
    assert max(len(sample.worker_ids) for sample in results) > 1
    assert not any(psutil.pid_exists(pid) for pid in before)
    record_property("span_s", status.usage.span_s)
    record_property("occupied_worker_s", status.usage.occupied_worker_s)
    await real_runtime.whole()
