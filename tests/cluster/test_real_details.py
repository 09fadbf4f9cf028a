"""What is asked beside ids and logprobs, through the journal, releases and a killed worker."""

import asyncio
from dataclasses import replace

import pytest

from actors.rollout_api import RolloutRequest, SampleResult, Strategy
from actors.token_detail import routed_rows
from tests.cluster.real_runtime import RealRuntime, assert_same, batch, kill

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def asking(request: RolloutRequest) -> RolloutRequest:
    samplings = tuple(
        replace(sampling, routed_experts=True, prompt_logprobs=2, top_logprobs=2)
        for sampling in request.samplings
    )
    return replace(request, samplings=samplings)


def assert_told_the_same(results: list[SampleResult], expected: list[SampleResult]) -> None:
    assert_same(results, expected)
    for result, other in zip(results, expected, strict=True):
        num_tokens = result.prompt_tokens + len(result.token_ids)
        assert routed_rows(result.detail, num_tokens) is not None, result.sample_id
        assert result.detail == other.detail, result.sample_id


@pytest.fixture(scope="module")
def told(real_runtime: RealRuntime) -> list[SampleResult]:
    """The batch as a static rollout decodes it, asked for everything."""
    request = asking(batch("told", strategy=Strategy.STATIC))
    return asyncio.run(real_runtime.decode(request))


async def test_an_elastic_rollout_tells_what_a_static_one_tells(
    real_runtime: RealRuntime, told: list[SampleResult]
) -> None:
    await real_runtime.whole()
    elastic = await real_runtime.decode(asking(batch("told-elastic")))
    assert any(len(sample.worker_ids) > 1 for sample in elastic)
    assert_told_the_same(elastic, told)


async def test_a_worker_that_dies_loses_nothing_of_what_was_told(
    real_runtime: RealRuntime, told: list[SampleResult]
) -> None:
    await real_runtime.whole()
    await real_runtime.client.submit(asking(batch("told-killed")))
    await real_runtime.decoding("told-killed", 150)
    kill((await real_runtime.member_pids())[1])
    assert_told_the_same(await real_runtime.results("told-killed"), told)
