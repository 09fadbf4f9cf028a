"""The Ray cluster that a command works in: one of its own on this machine, or somebody's.

A cluster of our own ends with the command. In somebody's cluster only what is ours is ended.
Slots of a local cluster may be logical: on a machine without GPUs Ray counts and numbers as
many GPUs as it is told, so that placement works as on a real node while all workers share the
cores. Whoever starts such a cluster is told so.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from placement.errors import UnavailableError

GPU = "GPU"
SERVICE_CPUS = 1  # the HTTP replica and Ray's own tasks, beside the workers


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


@contextmanager
def ray_cluster(
    address: str | None,
    namespace: str,
    worker_resources: Mapping[str, float],
    max_workers: int,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start a local one with room for the workers.

    Raises: UnavailableError.
    """
    try:
        try:
            if address is None:
                _start_local(namespace, worker_resources, max_workers, say)
            else:
                ray.init(
                    address=address,
                    namespace=namespace,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            where = f"at {address}" if address else "could be started on this machine"
            raise UnavailableError(f"no Ray cluster {where}: {error}") from error
        yield
    finally:
        ray.shutdown()


def _start_local(
    namespace: str,
    worker_resources: Mapping[str, float],
    max_workers: int,
    say: Callable[[str], None],
) -> None:
    wanted = {name: math.ceil(each * max_workers) for name, each in worker_resources.items()}
    cores = os.cpu_count() or 1
    cpus = max(cores, wanted.pop("CPU", 0) + SERVICE_CPUS)
    gpus = wanted.pop(GPU, 0)
    if gpus and has_gpu():
        num_gpus = None  # Ray finds the real ones; too few of them is what the lease reports
    else:
        num_gpus = gpus
        if gpus:
            say(f"no GPU here: {gpus} logical GPU slots share {cores} cores")
    if cpus > cores:
        say(f"{cpus} logical CPUs share {cores} cores")
    ray.init(
        address="local",
        namespace=namespace,
        num_cpus=cpus,
        num_gpus=num_gpus,
        resources={name: float(amount) for name, amount in wanted.items()},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
