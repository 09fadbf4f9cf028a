"""The adapter against the verl that is installed: its interface, and one step of a trainer.

verl's requirements contradict ours (docs/dependencies.md), so it is there only where somebody
put it.
"""

import ast
import asyncio
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from actors.control_api import ServingState
from actors.ray_coordinator import connect
from deploy.verl_server import VerlServer
from placement.errors import ConfigError, RequestError
from placement.ids import RolloutId
from tests.service.conftest import NAMESPACE

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None,
        reason="verl is not installed (docs/dependencies.md says how)",
    ),
]

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def verl_rollout() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of verl's own imports
        return importlib.import_module("deploy.verl_rollout")


@pytest.fixture
def config(verl_rollout: Any) -> Any:
    from verl.workers.config import RolloutConfig
    from verl.workers.config.rollout import CheckpointEngineConfig

    return RolloutConfig(
        name="flexfloor",
        prompt_length=16,
        response_length=8,
        tensor_model_parallel_size=1,
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1),
        engine_kwargs={"flexfloor": {"namespace": NAMESPACE, "address": "10.0.0.1:8000"}},
    )


def remote_calls(source: str, of: str) -> Iterator[tuple[str, list[str]]]:
    """(method, keywords) of every ``<of>.<method>.remote(...)``."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "remote"
            and isinstance(node.func.value, ast.Attribute)
            and ast.unparse(node.func.value.value) == of
        ):
            yield node.func.value.attr, [k.arg for k in node.keywords if k.arg is not None]


def test_verl_finds_it_by_the_name_of_its_module() -> None:
    program = """
        from verl.workers.rollout.base import get_rollout_class
        from verl.workers.rollout.replica import get_rollout_replica_class
        print(get_rollout_class("flexfloor").__name__)
        print(get_rollout_replica_class("flexfloor").__name__)
    """
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "deploy.verl_rollout"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert found.stdout.split() == ["FlexFloorAdapter", "FlexFloorReplica"]


def test_the_server_takes_every_call_that_verl_makes(verl_rollout: Any) -> None:
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutReplica

    calls = dict(remote_calls(inspect.getsource(RolloutReplica), "server"))
    own = {"start_profile", "stop_profile"}  # the replica itself says that there is no profiler
    assert calls.keys() > own
    assert own < vars(verl_rollout.FlexFloorReplica).keys()
    calls = {name: keywords for name, keywords in calls.items() if name not in own}
    calls |= dict(remote_calls(inspect.getsource(LLMServerClient.generate), "server"))
    assert len(calls) >= 7
    for name, keywords in calls.items():
        parameters = inspect.signature(getattr(VerlServer, name)).parameters
        assert set(keywords) <= parameters.keys(), name
    # What the client adds by ** where there is any.
    optional = {"audio_data", "mm_processor_kwargs", "priority"}
    assert optional < inspect.signature(VerlServer.generate).parameters.keys()


def test_the_adapter_has_every_method_that_verl_wants_with_its_parameters(
    verl_rollout: Any,
) -> None:
    from verl.workers.rollout.base import BaseRollout

    adapter = verl_rollout.FlexFloorAdapter
    assert not adapter.__abstractmethods__
    for name in BaseRollout.__abstractmethods__:
        wanted = inspect.signature(getattr(BaseRollout, name)).parameters
        assert wanted.keys() <= inspect.signature(getattr(adapter, name)).parameters.keys(), name


def test_an_answer_has_the_fields_of_verls_token_output(
    verl_rollout: Any, config: Any, coordinator: ray.actor.ActorHandle
) -> None:
    from verl.workers.rollout.replica import TokenOutput

    async def test() -> None:
        replica = verl_rollout.FlexFloorReplica(0, config, None)
        await replica.init_standalone()
        try:
            assert replica.server_address == "10.0.0.1:8000"
            call = asyncio.ensure_future(
                replica.server_handle.generate.remote(
                    request_id="v",
                    prompt_ids=[1, 2, 3],
                    sampling_params={"temperature": 1.0, "top_k": -1, "logprobs": True},
                    image_data=None,
                    video_data=None,
                )
            )
            client = connect(NAMESPACE)
            mine: list[RolloutId] = []
            async with asyncio.timeout(LIMIT_S):
                while not mine:
                    rollouts = await client.open_rollouts()
                    mine = [r.rollout_id for r in rollouts if r.rollout_id.startswith("v-")]
                await coordinator.finish.remote(mine[0], 1)
                output = await call
            assert isinstance(output, TokenOutput)
            assert (output.token_ids, output.stop_reason) == ([104, 105], "completed")
            assert output.log_probs == [-0.5, -0.25]
            await replica.sleep()
            assert (await client.pause_status()).state is ServingState.ASLEEP
            await replica.wake_up()
            assert (await client.pause_status()).state is ServingState.SERVING
            with pytest.raises(RequestError):
                await replica.start_profile()
        finally:
            ray.kill(replica.server_handle)

    asyncio.run(test())


def test_the_trainers_weights_arrive_in_parts_under_its_step(
    verl_rollout: Any,
    config: Any,
    coordinator: ray.actor.ActorHandle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    weights = [(f"layer.{i}", torch.full((1 << 18,), float(i))) for i in range(3)]  # 1 MiB each

    async def test() -> None:
        replica = verl_rollout.FlexFloorReplica(0, config, None)
        await replica.init_standalone()
        try:
            adapter = verl_rollout.FlexFloorAdapter(config, None, None)
            await adapter.update_weights(iter(weights), global_steps=7)
        finally:
            ray.kill(replica.server_handle)
        updates = await coordinator.updates_made.remote()
        assert {version for version, _, _, _ in updates} == {"7"}
        assert [(first, last) for _, first, last, _ in updates] == [
            (True, False),
            (False, False),
            (False, False),
            (False, True),
        ]
        assert [names for _, _, _, names in updates] == [
            ["layer.0"],
            ["layer.1"],
            ["layer.2"],
            [],
        ]
        assert (await connect(NAMESPACE).weight_status()).version == "7"

    asyncio.run(test())


def test_a_second_replica_is_refused(verl_rollout: Any, config: Any) -> None:
    replica = verl_rollout.FlexFloorReplica(1, config, None)
    with pytest.raises(ConfigError, match="one service is one replica"):
        asyncio.run(replica.launch_servers())
