"""When the process of an actor has gone.

Ray reports an actor as dead when it has decided so: 2-20 ms before the process ends when it is
killed, and five seconds before when the process is stopped and does not react. A lease must not
be removed before, so the node itself is asked for the pid.
"""

import time

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_tables import ProcessRow, read_nodes, read_process
from placement.errors import UnavailableError

_LOOK_EVERY_S = 0.01  # nothing tells us of the end of a process that is not our child
_PROBE_START_S = 30.0  # a probe on another node may have to start a worker process first


def wait_until_gone(process: ProcessRow, timeout_s: float) -> None:
    """Return when ``process`` has ended, or its node has.

    Raises:
        UnavailableError: it is still there after ``timeout_s``.
    """
    if process.node_id == ray.get_runtime_context().get_node_id():
        gone = _ends_within(process.pid, time.time(), timeout_s)
    elif not _is_alive(process.node_id):
        return
    else:
        gone = ask_node(process, timeout_s)
    if not gone:
        raise UnavailableError(
            f"process {process.pid} on node {process.node_id} has not ended within "
            f"{timeout_s:g} s of being told to; its lease stays until it is killed there"
        )


def kill_actor(handle: ActorHandle, timeout_s: float) -> None:
    """End an actor for good, and return when its process has gone. Idempotent.

    Raises:
        UnavailableError: the process is still there after ``timeout_s``.
    """
    ray.kill(handle, no_restart=True)
    process = read_process(handle)
    if process is not None:
        wait_until_gone(process, timeout_s)


def _is_alive(node_id: str) -> bool:
    return any(node.node_id == node_id for node in read_nodes())


def ask_node(process: ProcessRow, timeout_s: float) -> bool:
    """Whether ``process`` ends within ``timeout_s``, as a task on its node sees it."""
    on_its_node = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    probe = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)(_ends_within)
    try:
        answer = probe.remote(process.pid, time.time(), timeout_s)
        return bool(ray.get(answer, timeout=timeout_s + _PROBE_START_S))
    except RayError:
        # Without its node there is no process either; with it, the probe proves nothing.
        return not _is_alive(process.node_id)


def _ends_within(pid: int, asked_at: float, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while _exists(pid, asked_at):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _exists(pid: int, asked_at: float) -> bool:
    try:
        # A process born later is another one with the same number. A zombie still counts: its
        # other threads may hold memory and the device, and the raylet reaps it within 20 ms.
        return psutil.Process(pid).create_time() <= asked_at
    except psutil.NoSuchProcess:
        return False
