"""The small process that outlives workers and coordinators: rendezvous and memory.

A detached actor that owns the TCPStore through which members meet, keeps the last
``GroupRecord``, and reaps workers and leases when no coordinator is heard of. The TCPStore
listens on all interfaces of its node and knows no authentication, as torch's rendezvous always
does: keep the cluster's network private.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.ports import GroupRecord
from actors.ray_answers import await_answer
from actors.ray_teardown import STORE_NAME, end_workers_and_leases
from actors.reaper import Reaper
from placement.errors import UnavailableError
from placement.ids import Generation

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0  # a call takes milliseconds; the first may wait for the import of torch
_STORE_TIMEOUT_S = 30.0  # bound on a key operation of the owner itself
_REAP_TIMEOUT_S = 30.0  # Ray kills a process that does not react after 5 s


class GroupMemory:
    """The TCPStore and the record. Safe to call from several threads."""

    def __init__(self, host: str) -> None:
        # Not at the top: those who only call the store must not pay seconds for torch.
        from torch.distributed import TCPStore  # noqa: PLC0415

        self._store = TCPStore(
            host, 0, None, True, timedelta(seconds=_STORE_TIMEOUT_S), wait_for_workers=False
        )
        self._host = host
        self._lock = threading.Lock()
        self._record: GroupRecord | None = None

    def address(self) -> tuple[str, int]:
        return self._host, self._store.port

    def record(self, record: GroupRecord) -> None:
        with self._lock:
            self._record = record

    def load(self) -> GroupRecord | None:
        with self._lock:
            return self._record

    def forget_generation(self, generation: Generation) -> None:
        """Delete the keys under ``g<generation>/``; nobody may use that generation any more."""
        for key in self._store.list_keys():
            if key.startswith(f"g{generation}/"):
                self._store.delete_key(key)


class StoreShell:
    """The actor around ``GroupMemory`` and ``Reaper``."""

    def __init__(self, namespace: str, reaper_timeout_s: float) -> None:
        self._memory = GroupMemory(ray.util.get_node_ip_address())
        self._namespace = namespace
        self._myself = ray.get_runtime_context().current_actor
        self._reaper = Reaper(reaper_timeout_s, self._reap)
        self._reaper.start()

    def address(self) -> tuple[str, int]:
        return self._memory.address()

    def heartbeat(self) -> None:
        self._reaper.beat()

    def record(self, record: GroupRecord) -> None:
        self._memory.record(record)

    def load(self) -> GroupRecord | None:
        return self._memory.load()

    def forget_generation(self, generation: Generation) -> None:
        self._memory.forget_generation(generation)

    def _reap(self, reason: str) -> None:
        try:
            logger.error("reaper: %s", end_workers_and_leases(self._namespace, _REAP_TIMEOUT_S))
        finally:
            # A store without a coordinator is of no use, and its successor starts empty.
            ray.kill(self._myself, no_restart=True)


class RayGroupStore:
    """``GroupStore`` over the actor.

    Args:
        find_or_start: the actor's handle, from a living one or a new one; blocks.
    """

    def __init__(self, find_or_start: Callable[[], ActorHandle]) -> None:
        self._find_or_start = find_or_start
        self._handle = find_or_start()

    async def address(self) -> tuple[str, int]:
        host, port = await self._call("address")
        return host, port

    async def heartbeat(self) -> None:
        await self._call("heartbeat")

    async def renew(self) -> bool:
        before = self._handle
        self._handle = await asyncio.to_thread(self._find_or_start)
        return self._handle != before

    async def record(self, record: GroupRecord) -> None:
        await self._call("record", record)

    async def load(self) -> GroupRecord | None:
        return await self._call("load")

    async def forget_generation(self, generation: Generation) -> None:
        await self._call("forget_generation", generation)

    async def _call(self, method: str, *args: Any) -> Any:
        ref = getattr(self._handle, method).remote(*args)
        return await await_answer(
            ref, _CALL_TIMEOUT_S, who="the store actor", what=method, lost=UnavailableError
        )


def start_store(
    namespace: str, reaper_timeout_s: float, resources: Mapping[str, float] = MappingProxyType({})
) -> RayGroupStore:
    """The store of this namespace; it is started if there is none, on a node with ``resources``.

    Returns before it serves.
    """
    actor = ray.remote(StoreShell).options(
        name=STORE_NAME,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,  # a restarted one would be empty, and its port another one
        max_concurrency=4,
        num_cpus=0,
        resources=dict(resources),
    )
    return RayGroupStore(lambda: actor.remote(namespace, reaper_timeout_s))
