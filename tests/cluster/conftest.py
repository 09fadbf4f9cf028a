"""One Ray cluster for the whole session: four logical GPUs, in a directory of its own."""

import asyncio
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from actors.ray_coordinator import launch, shutdown_runtime
from actors.rollout_api import SampleResult, Strategy
from deploy.make_model import make_model
from tests.cluster.real_runtime import RealRuntime, batch, settings

ROOT = Path(__file__).resolve().parents[2]
NUM_SLOTS = 4

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(ROOT)  # workers import the fakes that live beside the tests


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Address of the cluster. Only processes that it started are ended with it."""
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ff", ignore_cleanup_errors=True) as directory:
        context = ray.init(
            address="local",
            num_cpus=8,
            num_gpus=NUM_SLOTS,  # logical ones: Ray numbers and schedules them, nothing is there
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=directory,
        )
        children = psutil.Process().children(recursive=True)
        try:
            yield context.address_info["address"]
        finally:
            children += psutil.Process().children(recursive=True)
            ray.shutdown()
            _, alive = psutil.wait_procs(set(children), timeout=10)
            for process in alive:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(alive, timeout=10)


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the actors do."""
    return "asyncio"


@pytest.fixture
def namespace(cluster: str) -> Iterator[str]:
    """A Ray namespace of the test's own, empty again at its end."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    shutdown_runtime(name)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def real_runtime(cluster: str, model: str) -> Iterator[RealRuntime]:
    """Four workers that host vLLM, for all tests of a file; they take all slots."""
    name = f"real-{uuid.uuid4().hex[:8]}"
    client = launch(settings(name, model))
    try:
        yield RealRuntime(client, name, cluster)
    finally:
        shutdown_runtime(name)


@pytest.fixture(scope="module")
def reference(real_runtime: RealRuntime) -> list[SampleResult]:
    """The batch as a static rollout decodes it."""
    request = batch("reference", strategy=Strategy.STATIC)
    return asyncio.run(real_runtime.decode(request))
