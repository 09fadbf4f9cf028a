"""One Ray cluster with the HTTP service on it, in front of a coordinator that is a fake."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from actors.control_api import ObjectWeights, PauseStatus
from actors.ray_coordinator import launch, shutdown_runtime
from actors.ray_teardown import COORDINATOR_NAME
from deploy import application
from deploy.config import FlexFloorConfig, check_tree
from deploy.make_model import ModelShape, make_model
from tests.unit.fake_coordinator import FakeCoordinator

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "test-service"
REAL_NAMESPACE = "test-real-service"
NUM_REAL_WORKERS = 2

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(ROOT)  # the actor imports the fake that lives beside the tests


class FakeCoordinatorActor(FakeCoordinator):
    """The fake in a process of its own; ``auto_finish`` is off."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        super().__init__(auto_finish=False)

    async def aborted_ids(self) -> list[str]:
        return list(self.aborted)

    async def wake(self, wait_s: float = 0.0, stay_paused: bool = False) -> PauseStatus:  # type: ignore[override]
        """As the coordinator's actor takes it: Ray's calls have their arguments in order."""
        return await super().wake(wait_s, stay_paused=stay_paused)

    async def reset_prefix_cache(self, running: bool = False) -> bool:  # type: ignore[override]
        return await super().reset_prefix_cache(running=running)

    async def updates_made(self) -> list[tuple[str, bool, bool, list[str]]]:
        """Of every part of an update: version, first, last, names of the tensors."""
        made = []
        for update in self.updates:
            assert isinstance(update.source, ObjectWeights)
            parts = [await reference for reference in update.source.objects]
            names = [name for part in parts for name in part]
            made.append((update.version, update.first, update.last, names))
        return made


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> FlexFloorConfig:
    model = make_model(tmp_path_factory.mktemp("model") / "tiny", shape=ModelShape(layers=1))
    tree = {
        "model": {"path": str(model)},
        "service": {"port": free_port(), "poll_wait_s": 1.0},
        "namespace": NAMESPACE,
    }
    config, errors = check_tree(tree)
    assert config is not None, errors
    return config


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The cluster that tests of this process have started already, or one of our own."""
    if ray.is_initialized():
        yield
        return
    # Ray's sockets lie in it, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="fs", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=directory,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def coordinator(ray_cluster: None) -> Iterator[ray.actor.ActorHandle]:
    """The fake coordinator's actor, under the name by which the service finds it."""
    handle = (
        ray.remote(FakeCoordinatorActor)
        .options(name=COORDINATOR_NAME, namespace=NAMESPACE, num_cpus=0, max_concurrency=100)
        .remote()
    )
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="session")
def url(config: FlexFloorConfig, coordinator: ray.actor.ActorHandle) -> Iterator[str]:
    yield application.run(config)
    application.stop()


@pytest.fixture(scope="module")
def real_url(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base address of a service of its own on the cluster's Ray Serve."""
    model = make_model(tmp_path_factory.mktemp("real") / "tiny")
    tree = {
        "model": {"path": str(model), "max_model_len": 512, "exact": True},
        "group": {
            "max_workers": NUM_REAL_WORKERS,
            "max_samples_per_worker": 8,
            "kv_memory_bytes": 16 << 20,
        },
        "lease": {"resources": {"CPU": 0.5}},
        # The workers share the cores, and the responses are short.
        "planning": {"unit": "steps", "replan_steps": 4},
        "service": {"poll_wait_s": 1.0},
        "namespace": REAL_NAMESPACE,
    }
    config, errors = check_tree(tree)
    assert config is not None, errors
    launch(config.runtime)
    try:
        serve.run(application.compose(config), name="real", route_prefix="/real")
        yield f"{url}/real"
        serve.delete("real")
    finally:
        shutdown_runtime(REAL_NAMESPACE)


@pytest.fixture(scope="module")
def model(real_url: str) -> str:
    """The name of the model that is served."""
    name: str = httpx.get(f"{real_url}/v1/models", timeout=60.0).json()["data"][0]["id"]
    return name
