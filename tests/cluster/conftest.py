"""One Ray cluster for the whole session: four logical GPUs, in a directory of its own."""

import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from actors.ray_coordinator import shutdown_runtime

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
