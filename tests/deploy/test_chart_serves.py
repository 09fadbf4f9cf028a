"""The rendered Serve configuration, handed to Ray Serve as KubeRay's operator hands it over."""

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from actors.ray_coordinator import shutdown_runtime
from deploy.make_model import make_model
from tests.deploy.conftest import ROOT, Render

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

START_LIMIT_S = 240.0
CALL_LIMIT_S = 60.0
POLL_S = 0.5


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of one node that has what the chart's head and one GPU pod have."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the image has FlexFloor installed
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's sockets lie in it, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="fh", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            num_cpus=0,
            num_gpus=1,
            resources={"flexfloor_control": 1},
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=directory,
        )
        yield
        serve.shutdown()
        shutdown_runtime("flexfloor")
        ray.shutdown()


def test_the_rendered_configuration_serves_rollouts(
    render: Render, head: None, tmp_path: Path
) -> None:
    port = free_port()
    settings = {
        "model": {"path": str(make_model(tmp_path / "model")), "max_model_len": 256},
        "group": {"max_workers": 1, "min_workers": 1, "kv_memory_bytes": 16 << 20},
        "service": {"host": "127.0.0.1", "port": port},
    }
    config = serve_config_of(render({"config": settings}))
    serve.start(
        proxy_location=config.proxy_location,
        http_options={"host": config.http_options.host, "port": config.http_options.port},
    )
    _get_global_client().deploy_apps(config)

    url = f"http://127.0.0.1:{port}"
    wait_until_it_answers(f"{url}/health")
    # Coordinator, store and HTTP replica hold what only the head has.
    assert ray.available_resources()["flexfloor_control"] == pytest.approx(0.97)
    body = {"prompts": ["hello"], "n": 2, "sampling": {"max_tokens": 8, "ignore_eos": True}}
    answer = httpx.post(f"{url}/v1/rollouts", json=body, timeout=CALL_LIMIT_S)
    assert [len(sample["token_ids"]) for sample in answer.json()["samples"]] == [8, 8]
    assert "flexfloor_tokens_total 16.0" in httpx.get(f"{url}/metrics", timeout=CALL_LIMIT_S).text


def serve_config_of(objects: list[dict[str, Any]]) -> ServeDeploySchema:
    (service,) = (item for item in objects if item["kind"] == "RayService")
    return ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))


def wait_until_it_answers(url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            if httpx.get(url, timeout=CALL_LIMIT_S).status_code == 200:
                return
        except httpx.TransportError:  # the proxy does not listen yet
            pass
        told = serve.status().applications["flexfloor"] if serve.status().applications else None
        assert time.monotonic() < deadline, told
        assert told is None or told.status != "DEPLOY_FAILED", told
        time.sleep(POLL_S)
