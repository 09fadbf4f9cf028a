"""The SGLang dialect's control routes, in the shapes of slime's, verl's and AReaL's requests."""

import base64
from typing import Any

import httpx
import pytest

from actors.control_api import DiskWeights, GroupWeights, ObjectWeights, WeightsGroup, WeightUpdate
from placement.errors import WeightUpdateError
from placement.samples import FinishReason
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import waiting_for_samples, with_service

INIT = {
    "master_address": "10.0.0.7",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "slime",
    "backend": "gloo",
}
BUCKET = {
    "names": ["a", "b"],
    "dtypes": ["torch.bfloat16", "float32"],
    "shapes": [[2, 3], [4]],
    "group_name": "slime",
    "flush_cache": False,
    "weight_version": "5",
}
TENSORS = GroupWeights("slime", ("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)))
NOTHING = ObjectWeights(())


async def post(client: httpx.AsyncClient, path: str, content: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=content)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        ({"mode": "abort"}, ["pause abort"]),
        ({"mode": "in_place"}, ["pause keep"]),
        ({"mode": "retract"}, ["pause keep", "reset running"]),
        ({}, ["pause abort"]),
        (None, ["pause abort"]),
    ],
)
def test_each_mode_pauses_as_it_says(mode: dict[str, Any] | None, asked: list[str]) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await post(client, "/pause_generation", mode))["status"] == "ok"
        assert (await post(client, "/continue_generation", {}))["status"] == "ok"
        assert coordinator.control == [*asked, "resume"]

    with_service(test)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_is_200_only_when_nothing_runs(method: str) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.request(method, "/flush_cache")).status_code == 200
        async with waiting_for_samples(client, coordinator, "r"):
            for _ in range(2):
                answer = await client.request(method, "/flush_cache")
                assert answer.status_code == 400
                assert answer.json()["success"] is False
                assert "retract" in answer.json()["message"]
            await post(client, "/abort_request", {"abort_all": True})
        assert (await client.request(method, "/flush_cache")).status_code == 200

    with_service(test)


def test_an_abort_of_all_can_be_sent_again_until_the_load_is_zero() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        async with waiting_for_samples(client, coordinator, "r"):
            for _ in range(3):
                await post(client, "/abort_request", {"abort_all": True})
            loads = (await client.get("/v1/loads?include=core")).json()
            assert loads["loads"][0]["num_total_reqs"] == 0
        (sample,) = coordinator.ended["r"]  # type: ignore[index]
        assert sample.finish_reason is FinishReason.ABORT
        assert coordinator.aborted == ["r"]

    with_service(test)


def test_memory_is_released_and_resumed_weights_first() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        await post(client, "/resume_memory_occupation", {"tags": ["weights"]})
        await post(client, "/update_weights_from_disk", {"model_path": "/w/1"})
        await post(client, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        await post(client, "/release_memory_occupation")
        await post(client, "/resume_memory_occupation", {})
        assert coordinator.control == [
            "sleep keep",
            "wake, stay paused",
            "wake",
            "sleep keep",
            "wake",
        ]

    with_service(test)


def test_slimes_buckets_are_loaded_together_when_generation_continues() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/init_weights_update_group", INIT)
        group = WeightsGroup("slime", "10.0.0.7", 29500, 1, 2, "gloo")
        assert coordinator.weights_groups == {"slime": group}
        await post(client, "/pause_generation", {"mode": "retract"})
        assert (await client.get("/flush_cache")).status_code == 200
        for _ in range(3):
            answer = await post(client, "/update_weights_from_distributed", BUCKET)
            assert answer["success"] is True
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "0"}
        await post(client, "/continue_generation", {})
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "5"}
        assert coordinator.updates == [
            WeightUpdate(TENSORS, "5", first=True, last=False),
            WeightUpdate(TENSORS, "5", first=False, last=False),
            WeightUpdate(TENSORS, "5", first=False, last=False),
            WeightUpdate(NOTHING, "5", first=False, last=True),
        ]
        await post(client, "/destroy_weights_update_group", {"group_name": "slime"})
        assert coordinator.weights_groups == {}

    with_service(test)


def test_buckets_of_a_new_version_drop_those_of_an_interrupted_one() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/pause_generation", {"mode": "in_place"})
        await post(client, "/update_weights_from_distributed", BUCKET)
        await post(client, "/update_weights_from_distributed", BUCKET | {"weight_version": "6"})
        assert [(update.version, update.first) for update in coordinator.updates] == [
            ("5", True),
            ("6", True),
        ]

    with_service(test)


def test_while_generation_goes_on_tensors_are_loaded_at_once() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/update_weights_from_distributed", BUCKET)
        file = base64.b64encode(b"tensors").decode()
        content = {"serialized_named_tensors": [file], "load_format": "safetensors"}
        await post(client, "/update_weights_from_tensor", content)
        assert coordinator.updates == [
            WeightUpdate(TENSORS, "5"),
            WeightUpdate(ObjectWeights((b"tensors",)), "6"),
        ]

    with_service(test)


def test_weights_come_from_disk_with_a_name_or_the_next_number() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        content = {"model_path": "/w/7", "weight_version": "step-7", "flush_cache": True}
        assert (await post(client, "/update_weights_from_disk", content))["success"] is True
        await post(client, "/update_weights_from_disk", {"model_path": "/w/8"})
        assert coordinator.updates == [
            WeightUpdate(DiskWeights("/w/7"), "step-7"),
            WeightUpdate(DiskWeights("/w/8"), "step-7+1"),
        ]

    with_service(test)


def test_an_update_may_abort_all_requests_first() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        async with waiting_for_samples(client, coordinator, "r"):
            content = {"model_path": "/w", "abort_all_requests": True}
            await post(client, "/update_weights_from_disk", content)
        assert coordinator.aborted == ["r"]

    with_service(test)


def test_a_failed_update_says_why_in_sglangs_shape_and_generation_stays_paused() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await post(client, "/pause_generation", {"mode": "in_place"})
        await post(client, "/update_weights_from_distributed", BUCKET)
        coordinator.update_error = WeightUpdateError("worker 2 failed; version 0 serves on")
        answer = await client.post("/continue_generation", json={})
        assert answer.status_code == 500
        assert answer.json()["success"] is False
        assert "worker 2 failed" in answer.json()["message"]
        assert coordinator.control == ["pause keep"]
        coordinator.update_error = None
        await post(client, "/continue_generation", {})

    with_service(test)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "direct"])
def test_pickled_tensors_are_not_read(load_format: str | None) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        content = {"serialized_named_tensors": ["gASVAA=="], "load_format": load_format}
        answer = await client.post("/update_weights_from_tensor", json=content)
        assert answer.status_code == 501
        assert answer.json()["error"]["field"] == "load_format"
        assert "safetensors" in answer.json()["message"]
        assert coordinator.updates == []

    with_service(test)


WRONG: dict[str, tuple[str, Any, str]] = {
    "mode": ("/pause_generation", {"mode": "stop"}, "mode"),
    "only the KV": ("/release_memory_occupation", {"tags": ["kv_cache"]}, "tags"),
    "tag": ("/resume_memory_occupation", {"tags": ["lora"]}, "tags[0]"),
    "no path": ("/update_weights_from_disk", {}, "model_path"),
    "another field": (
        "/update_weights_from_disk",
        {"model_path": "/w", "is_async": True},
        "is_async",
    ),
    "no base64": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA", "?"], "load_format": "safetensors"},
        "serialized_named_tensors[1]",
    ),
    "port": ("/init_weights_update_group", INIT | {"master_port": 0}, "master_port"),
    "rank": ("/init_weights_update_group", INIT | {"rank_offset": 0}, "rank_offset"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_in_sglangs_shape(name: str) -> None:
    path, content, field = WRONG[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post(path, json=content)
        assert answer.status_code == 400, answer.text
        assert answer.json()["success"] is False
        assert answer.json()["error"]["field"] == field
        assert coordinator.control == []
        assert coordinator.updates == []

    with_service(test)


def test_a_group_that_is_not_there_cannot_be_destroyed() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post("/destroy_weights_update_group", json={"group_name": "x"})
        assert answer.status_code == 404

    with_service(test)
