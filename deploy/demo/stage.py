"""What the demo stands on: a local Ray cluster with four slots, the runtime, the HTTP service.

One context manager starts them in that order and ends them in the other, whatever happens in
between. SIGTERM counts as Ctrl-C while it is open.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

import ray
from ray import serve

from actors.ray_coordinator import launch, shutdown_runtime
from deploy import application
from deploy.config import FlexFloorConfig
from deploy.demo.machine import gpu_names

OBJECT_STORE_BYTES = 200 << 20
"""Nothing large goes through Ray's object store."""

MIN_CPUS = 4
"""Logical CPUs of the cluster: nothing may wait for one on a machine with fewer cores."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What was started.

    Attributes:
        address: of the Ray cluster, for a second driver.
        url: of the HTTP service.
        slots: what the slots are, in words.
    """

    address: str
    url: str
    slots: str


@contextmanager
def set_stage(
    config: FlexFloorConfig, num_slots: int, say: Callable[[str], None]
) -> Iterator[Stage]:
    """Logical slots unless the machine has as many GPUs: Ray schedules and numbers either.

    Raises:
        FlexFloorError: the runtime did not start.
    """
    gpus = gpu_names()
    logical = len(gpus) < num_slots
    slots = (
        f"{num_slots} logical slots, numbered and scheduled by Ray, on shared cores (no GPUs)"
        if logical
        else f"{num_slots} of {len(gpus)} x {gpus[0]}"
    )
    with ExitStack() as ends:
        ends.callback(ray.shutdown)
        ray.init(
            address="local",
            num_gpus=num_slots,
            num_cpus=max(MIN_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        # After ray.init, which installs a handler of its own.
        ends.enter_context(_termination_as_interrupt())
        ends.callback(shutdown_runtime, config.namespace, say=say)
        launch(config.runtime, say=say)
        ends.callback(serve.shutdown)
        url = application.run(config)
        yield Stage(ray.get_runtime_context().gcs_address, url, slots)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    def interrupt(_: int, __: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
