"""The vLLM dialect's control routes, in the shapes of prime-rl's, TRL's and SkyRL's requests."""

from typing import Any

import httpx
import pytest

from actors.control_api import DiskWeights, GroupWeights, ObjectWeights, WeightsGroup, WeightUpdate
from placement.errors import WeightUpdateError
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import waiting_for_samples, with_service

INIT = {"master_address": "10.0.0.7", "master_port": 51216, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}


async def post(client: httpx.AsyncClient, path: str, content: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=content)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_each_mode_pauses_as_it_says_and_can_be_repeated(mode: str) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        for _ in range(2):
            path = f"/pause?mode={mode}&clear_cache=false"
            assert await post(client, path) == {"status": "paused"}
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert await post(client, "/resume") == {"status": "resumed"}
        assert await post(client, "/resume") == {"status": "resumed"}
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert coordinator.control == [f"pause {mode}"] * 2 + ["resume"] * 2

    with_service(test)


def test_without_a_mode_all_requests_are_aborted_and_answered() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        async with waiting_for_samples(client, coordinator, "r") as asking:
            await post(client, "/pause")
            (sample,) = (await asking).json()["samples"]
            assert sample["finish_reason"] == "abort"
        assert coordinator.control == ["pause abort"]

    with_service(test)


def test_levels_from_one_on_give_the_slots_back_and_level_zero_pauses() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert await post(client, "/sleep?level=2") == {"status": "sleeping", "level": 2}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await post(client, "/wake_up") == {"status": "awake", "tags": None}
        assert await post(client, "/sleep?level=0&mode=keep") == {"status": "sleeping", "level": 0}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await post(client, "/wake_up?tags=scheduling"))["status"] == "awake"
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert coordinator.control == ["sleep abort", "wake", "pause keep", "wake"]

    with_service(test)


def test_woken_for_weights_alone_the_group_stands_still_until_the_kv_is_woken() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/sleep")
        answer = await post(client, "/wake_up?tags=weights")
        assert answer == {"status": "sleeping", "tags": ["weights"]}
        await post(client, "/update_weights", {"weight_dir": "/w/1"})
        answer = await post(client, "/wake_up?tags=kv_cache")
        assert answer == {"status": "awake", "tags": ["kv_cache"]}

    with_service(test)


def test_prime_rls_update_pauses_loads_a_directory_and_goes_on() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/pause?mode=keep&clear_cache=false")
        answer = await post(client, "/update_weights", {"weight_dir": "/shared/step_7"})
        assert answer["weight_version"] == "1"
        await post(client, "/resume")
        named = {"weight_dir": "/shared/step_8", "weight_version": "step-8"}
        assert (await post(client, "/update_weights", named))["weight_version"] == "step-8"
        assert coordinator.updates == [
            WeightUpdate(DiskWeights("/shared/step_7"), "1"),
            WeightUpdate(DiskWeights("/shared/step_8"), "step-8"),
        ]
        assert (await client.get("/liveness")).status_code == 200

    with_service(test)


def test_trainers_that_broadcast_start_send_and_finish() -> None:
    """As vLLM's own trainer client and TRL's ask, but for the backend."""

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        for _ in range(2):  # a trainer that begins again
            info = {"init_info": INIT | {"backend": "gloo", "packed": False}}
            await post(client, "/init_weight_transfer_engine", info)
        group = WeightsGroup("vllm", "10.0.0.7", 51216, 1, 2, "gloo")
        assert coordinator.weights_groups == {"vllm": group}
        await post(client, "/start_weight_update", {})
        await post(client, "/update_weights", {"update_info": TENSORS})
        await post(client, "/update_weights", {"update_info": TENSORS})
        answer = await post(client, "/finish_weight_update", {"weight_version": "step-1"})
        assert answer["weight_version"] == "step-1"
        tensors = GroupWeights("vllm", ("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)))
        nothing = ObjectWeights(())
        assert coordinator.updates == [
            WeightUpdate(nothing, "1", first=True, last=False),
            WeightUpdate(tensors, "1", first=False, last=False),
            WeightUpdate(tensors, "1", first=False, last=False),
            WeightUpdate(nothing, "step-1", first=False, last=True),
        ]
        await post(client, "/shutdown_weight_transfer_engine")
        assert coordinator.weights_groups == {}

    with_service(test)


def test_an_update_that_was_not_started_cannot_be_finished() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post("/finish_weight_update")
        assert answer.status_code == 400
        assert "start" in answer.json()["error"]["message"]

    with_service(test)


def test_a_failed_update_says_why_in_vllms_shape_and_a_retry_works() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.update_error = WeightUpdateError("worker 2 failed; version 0 serves on")
        answer = await client.post("/update_weights", json={"weight_dir": "/w"})
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["message"], error["code"]) == ("worker 2 failed; version 0 serves on", 500)
        coordinator.update_error = None
        await post(client, "/update_weights", {"weight_dir": "/w"})

    with_service(test)


def test_a_reset_never_fails_silently_and_can_be_forced() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert await post(client, "/reset_prefix_cache") == {"success": True}
        async with waiting_for_samples(client, coordinator, "r"):
            assert await post(client, "/reset_prefix_cache") == {"success": False}
            forced = await post(client, "/reset_prefix_cache?reset_running_requests=true")
            assert forced == {"success": True}

    with_service(test)


@pytest.mark.parametrize(
    "info", [INIT, INIT | {"backend": "nccl", "packed": True}, INIT | {"nccl_unique_id_b64": "AA"}]
)
def test_vllms_own_rendezvous_is_refused_with_what_to_use_instead(info: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post("/init_weight_transfer_engine", json={"init_info": info})
        assert answer.status_code == 501
        assert "torch.distributed" in answer.json()["error"]["message"]
        config = (await client.get("/server_info")).json()["vllm_config"]
        assert config["weight_transfer_config"] is None, "TRL's client asks here first"

    with_service(test)


WRONG: dict[str, tuple[str, Any, str]] = {
    "mode": ("/pause?mode=stop", None, "mode"),
    "level": ("/sleep?level=3", None, "level"),
    "tag": ("/wake_up?tags=lora", None, "tags"),
    "a body": ("/pause", {"mode": "keep"}, "mode"),
    "nothing to load": ("/update_weights", {}, "update_info"),
    "both": ("/update_weights", {"weight_dir": "/w", "update_info": TENSORS}, "update_info"),
    "no shapes": (
        "/update_weights",
        {"update_info": {"names": [], "dtype_names": []}},
        "update_info.shapes",
    ),
    "packed": (
        "/update_weights",
        {"update_info": TENSORS | {"packed": True}},
        "update_info.packed",
    ),
    "version": ("/finish_weight_update", {"weight_version": ""}, "weight_version"),
    "rank": (
        "/init_weight_transfer_engine",
        {"init_info": INIT | {"rank_offset": 0}},
        "init_info.rank_offset",
    ),
    "address": (
        "/init_weight_transfer_engine",
        {"init_info": {"rank_offset": 1, "world_size": 2, "backend": "gloo"}},
        "init_info.master_address",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    path, content, param = WRONG[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post(path, json=content)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert coordinator.control == []
        assert coordinator.updates == []

    with_service(test)
