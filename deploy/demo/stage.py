"""What the demo stands on: a local Ray cluster with four slots, the runtime, the HTTP service.

One context manager starts them in that order and ends them in the other, whatever happens in
between. SIGTERM counts as Ctrl-C while it is open.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import ray

from actors.ray_coordinator import COORDINATOR, launch, shutdown_runtime
from deploy import application
from deploy.cluster import ray_cluster
from deploy.config import FlexFloorConfig
from deploy.demo.machine import gpu_names
from deploy.serving import ignore_stop_signals, stop_signals_interrupt
from placement.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """What was started.

    Attributes:
        address: of the Ray cluster, for a second driver.
        url: of the HTTP service.
        slots: what the slots are, in words.
        exact: the workers decode in exact mode.
    """

    address: str
    url: str
    slots: str
    exact: bool


@contextmanager
def set_stage(
    config: FlexFloorConfig, say: Callable[[str], None], coordinator: str = COORDINATOR
) -> Iterator[Stage]:
    """One slot per worker: GPUs, or logical ones where there are none.

    Args:
        coordinator: import path of what the coordinator's actor hosts.

    Raises:
        ConfigError: the machine has GPUs, but too few.
        FlexFloorError: a part did not start.
    """
    slots = _describe_slots(config.group.max_workers)
    with ExitStack() as ends:
        ends.enter_context(
            ray_cluster(
                None, config.namespace, config.lease.resources, config.group.max_workers, say
            )
        )
        ends.enter_context(stop_signals_interrupt())
        try:
            launch(config.runtime, say=say, coordinator=coordinator)
            ends.callback(shutdown_runtime, config.namespace, say=say)
            ends.callback(application.stop)
            url = application.run(config)
            yield Stage(ray.get_runtime_context().gcs_address, url, slots, config.model.exact)
        finally:
            ignore_stop_signals()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _describe_slots(count: int) -> str:
    gpus = gpu_names()
    if not gpus:
        return f"{count} logical ones, scheduled and numbered by Ray, on shared cores (no GPU here)"
    if len(gpus) < count:
        raise ConfigError(
            f"the demo needs {count} slots, and this machine has {len(gpus)} GPUs; "
            "run it where there are as many, or none",
            field="group.max_workers",
        )
    return f"{count} of {len(gpus)} x {gpus[0]}"
