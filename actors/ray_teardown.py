"""Finding and ending what is ours in a Ray cluster: workers first, then their leases.

Everything is found by its name, so it works for whoever calls it: the coordinator's shutdown,
the reaper, and a command line after all else has failed. All calls block.
"""

import time

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from actors.ray_leases import lease_prefix, remove_leases
from actors.ray_processes import kill_actor, wait_until_gone
from actors.ray_tables import read_process
from placement.ids import WorkerId

COORDINATOR_NAME = "coordinator"
STORE_NAME = "store"
KEEPER_NAME = "weights"
_WORKER_PREFIX = "worker-"


def worker_name(worker_id: WorkerId) -> str:
    return f"{_WORKER_PREFIX}{worker_id}"


def find_actor(name: str, namespace: str) -> ActorHandle | None:
    """The living actor of this name, or None."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:  # Ray's answer for an unknown name
        return None


def end_workers_and_leases(namespace: str, timeout_s: float) -> str:
    """Kill every worker and the keeper of the weights, wait until their processes have gone,
    remove every lease.

    Returns:
        One line that says what was ended. Idempotent.

    Raises:
        UnavailableError: a process or a bundle is still there after ``timeout_s``; the leases
            of processes that live are kept.
    """
    deadline_s = time.monotonic() + timeout_s
    names = [
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace and actor["name"].startswith(_WORKER_PREFIX)
    ]
    processes = []
    for name in [*names, KEEPER_NAME]:
        handle = find_actor(name, namespace)
        if handle is not None:  # else it has just ended by itself
            processes.append(read_process(handle))
            ray.kill(handle, no_restart=True)
    for process in processes:
        if process is not None:
            wait_until_gone(process, max(0.0, deadline_s - time.monotonic()))
    remove_leases(lease_prefix(namespace))
    return f"ended workers {', '.join(sorted(names)) or '(none)'} and removed all leases"


def end_named_actor(name: str, namespace: str, timeout_s: float) -> None:
    """Kill one of our actors, if it lives, and return when its process has gone."""
    handle = find_actor(name, namespace)
    if handle is not None:
        kill_actor(handle, timeout_s)
