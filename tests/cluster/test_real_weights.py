"""New weights on workers that host vLLM: whatever the group has been through, it decodes with them
what an engine decodes that has read them from disk.
"""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors import sparse_delta
from actors.admission import make_samples
from actors.control_api import DiskWeights, ObjectWeights, PauseMode, ServingState, WeightUpdate
from actors.ray_teardown import KEEPER_NAME
from actors.rollout_api import SampleResult, ServedModel
from placement.errors import RequestError
from placement.ids import RolloutId
from tests.cluster.real_runtime import (
    MAX_MODEL_LEN,
    ROLLOUT_BOUND_S,
    RealRuntime,
    batch,
    kill,
    until,
)
from tests.engine import other_weights
from tests.engine.local_group import LocalGroup, Response

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

Tensors = dict[str, torch.Tensor]

TAIL = (8, 8, 8, 8, 8, 8, 8, 900)
"""One sample that goes on for long behind all others."""


@pytest.fixture(scope="module")
def whole(model: str) -> Tensors:
    return other_weights.perturbed(other_weights.read(model), seed=1)


@pytest.fixture(scope="module")
def later(whole: Tensors) -> Tensors:
    """With a hundredth of the elements changed."""
    return other_weights.perturbed(whole, seed=2, share=0.01)


@pytest.fixture(scope="module")
def reference(
    cluster: str, model: str, later: Tensors, tmp_path_factory: pytest.TempPathFactory
) -> list[Response]:
    """The batch as one engine decodes it that has read the later weights from disk."""
    directory = tmp_path_factory.mktemp("later") / "model"
    fresh = LocalGroup(other_weights.write_model(model, directory, later), 1)
    try:
        facts = ServedModel(model, 1 << 30, MAX_MODEL_LEN, True, ())
        samples = make_samples(batch("fresh"), facts)
        fresh.submit(0, *samples)
        done = fresh.finish_all()
        return [done[sample.sample_id] for sample in samples]
    finally:
        fresh.close()


def assert_same(results: list[SampleResult], reference: list[Response]) -> None:
    """Tokens and logprobs, bit for bit."""
    for result, expected in zip(results, reference, strict=True):
        assert result.finish_reason == expected.finish, result.error
        assert list(result.token_ids) == expected.token_ids, result.sample_id
        assert list(result.logprobs) == expected.logprobs, result.sample_id


async def _members(runtime: RealRuntime) -> int:
    return sum(worker.rank is not None for worker in await runtime.client.workers())


async def test_weights_delta_release_and_regrowth_give_what_a_fresh_engine_gives(
    real_runtime: RealRuntime,
    reference: list[Response],
    model: str,
    whole: Tensors,
    later: Tensors,
    tmp_path: Path,
    record_property: Any,
) -> None:
    client = real_runtime.client
    await real_runtime.whole()
    await client.submit(batch("tail", TAIL))
    await real_runtime.decoding("tail", 30)

    path = other_weights.write_model(model, tmp_path / "whole", whole)
    status = await client.update_weights(WeightUpdate(DiskWeights(path), "whole"))
    assert status.version == (await client.served_model()).weight_version == "whole"
    assert status.copy_bytes == status.received_bytes == sum(t.nbytes for t in whole.values())
    record_property("whole_s", status.seconds)
    record_property("whole_phases_s", status.phases_s)

    async def alone() -> bool:
        return await _members(real_runtime) == 1 and await real_runtime.change() is None

    await until(alone, ROLLOUT_BOUND_S, "a group of one")
    delta = sparse_delta.make_delta(whole, later)
    names = sorted(delta)
    parts = [{name: delta[name] for name in names[i::2]} for i in range(2)]
    update = WeightUpdate(
        ObjectWeights(tuple(ray.put(part) for part in parts)),
        "later",
        base_version="whole",
        checksum=sparse_delta.checksum(delta),
    )
    status = await client.update_weights(update)
    record_property("delta_s", status.seconds)
    record_property("delta_phases_s", status.phases_s)
    assert status.version == "later"
    await client.abort(RolloutId("tail"))
    tail = await real_runtime.results("tail")
    long = next(sample for sample in tail if sample.token_ids and len(sample.token_ids) > 8)
    assert [version for _, version in long.weight_versions] == ["0", "whole", "later"]
    assert len(long.logprobs) == len(long.token_ids)

    await real_runtime.whole()
    results = await real_runtime.decode(batch("after"))
    assert_same(results, reference)
    assert {sample.weight_versions for sample in results} == {((0, "later"),)}


async def test_what_is_wrong_is_said_and_what_is_served_serves_on(
    real_runtime: RealRuntime, reference: list[Response], later: Tensors
) -> None:
    client = real_runtime.client
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    cut = ray.put({name: later[name][:1]})
    with pytest.raises(RequestError, match=f"{name} is bfloat16 .*the checkpoint has") as refused:
        await client.update_weights(WeightUpdate(ObjectWeights((cut,)), "cut"))
    assert refused.value.field == "source.objects"
    assert (await client.weight_status()).failed_version == "cut"
    assert_same(await real_runtime.decode(batch("as before")), reference)


async def test_a_service_that_slept_wakes_with_the_weights_it_had(
    real_runtime: RealRuntime, reference: list[Response]
) -> None:
    client = real_runtime.client
    status = await client.sleep(PauseMode.KEEP, wait_s=60.0)
    assert status.state is ServingState.ASLEEP
    assert not await client.workers()
    status = await client.wake(wait_s=50.0)
    while status.on_its_way:
        status = await client.pause_status(wait_s=50.0)
    assert status.state is ServingState.SERVING, status.error
    results = await real_runtime.decode(batch("awake"))
    assert_same(results, reference)
    assert {sample.weight_version for sample in results} == {"later"}


async def test_a_coordinator_that_comes_back_knows_which_weights_are_served(
    real_runtime: RealRuntime, reference: list[Response]
) -> None:
    await real_runtime.whole()
    await real_runtime.kill_coordinator()
    assert (await real_runtime.client.weight_status()).version == "later"
    assert_same(await real_runtime.decode(batch("after its death")), reference)


async def test_a_keeper_that_is_killed_costs_the_copy_alone(
    real_runtime: RealRuntime, reference: list[Response], later: Tensors
) -> None:
    client = real_runtime.client
    keeper = real_runtime.process(KEEPER_NAME)
    assert keeper is not None
    kill(keeper.pid)
    assert_same(await real_runtime.decode(batch("without a keeper")), reference)
    assert (await client.weight_status()).copy_bytes == 0
    part = ray.put({"model.norm.weight": later["model.norm.weight"]})
    with pytest.raises(RequestError, match="the full copy of version later was lost"):
        await client.update_weights(WeightUpdate(ObjectWeights((part,)), "part"))
    status = await client.update_weights(WeightUpdate(ObjectWeights((ray.put(later),)), "again"))
    assert status.copy_bytes == sum(t.nbytes for t in later.values())
    results = await real_runtime.decode(batch("again"))
    assert_same(results, reference)
    assert {sample.weight_version for sample in results} == {"again"}
