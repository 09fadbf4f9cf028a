"""CPU seconds of a service on this machine, by its parts, as the kernel counts them."""

import psutil

PARTS = {
    "coordinator": ("ray::CoordinatorShell",),
    "http": ("ray::ServeReplica", "ray::ProxyActor"),
    "store": ("ray::Store", "ray::StoreShell"),
    "ray_serve": ("ray::ServeController",),
}
"""Beginnings of the titles that Ray gives its actors' processes."""
RAY = ("raylet", "gcs_server", "plasma", "log_monitor", "monitor.py", "dashboard", "agent")


def cpu_by_part(worker_pid: int) -> dict[str, float]:
    """So far: the worker, coordinator, HTTP (replica and proxy), store, Ray itself (raylet, GCS,
    agents, idle processes) and this client. Only processes that descend from this one."""
    me = psutil.Process()
    spent: dict[str, float] = {"client": _seconds(me)}
    for process in me.children(recursive=True):
        try:
            part = _part(process, worker_pid)
            spent[part] = spent.get(part, 0.0) + _seconds(process)
        except psutil.NoSuchProcess:
            continue  # one that Ray had started ahead and ended
    return spent


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _part(process: psutil.Process, worker_pid: int) -> str:
    if process.pid == worker_pid:
        return "worker"
    title = " ".join(process.cmdline())
    for part, beginnings in PARTS.items():
        if title.startswith(beginnings):
            return part
    return "ray" if title.startswith("ray::") or any(word in title for word in RAY) else "other"
