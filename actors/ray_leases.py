"""Leases: one detached placement group of one bundle per worker.

Ray cannot give back a part of a placement group, hence one per worker. A lease's name tells its
namespace and the time of its request, so that a later coordinator finds it and knows since when
it is held. Nothing is remembered here: Ray's tables are the only record.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.ports import Lease
from actors.ray_tables import GroupRow, NodeRow, read_groups, read_nodes
from actors.settings import LeaseSettings
from placement.errors import ConfigError, UnavailableError

_SAY_EVERY_S = 1.0
_LOOK_EVERY_S = 0.01  # Ray has no notice of a removal that has reached the node
_REMOVAL_BOUND_S = 10.0  # measured: 0.06 s; more than this means that Ray's control plane hangs
_NOT_WORKER_SPECIFIC = ("CPU", "memory")


def lease_prefix(namespace: str) -> str:
    """How the names of all leases of a namespace begin."""
    return f"{namespace}.lease."


class RayLeases:
    """``LeasePort`` over Ray. Safe to use from one event loop; keeps no state."""

    def __init__(self, settings: LeaseSettings, namespace: str) -> None:
        if not any(amount > 0 for amount in settings.resources.values()):
            raise ConfigError(
                f"{settings.resources} leases nothing; name at least one resource above 0, "
                "such as GPU: 1",
                field="lease.resources",
            )
        self._bundle = {name: amount for name, amount in settings.resources.items() if amount > 0}
        self._label_selector = settings.label_selector
        self._prefix = lease_prefix(namespace)

    async def acquire(
        self, count: int, timeout_s: float, say: Callable[[str], None]
    ) -> list[Lease]:
        deadline_s = time.monotonic() + timeout_s
        asked: dict[str, PlacementGroup] = {}
        try:
            for _ in range(count):
                name = f"{self._prefix}{time.time():.3f}.{uuid.uuid4().hex[:8]}"
                asked[name] = await asyncio.to_thread(self._request, name)
            await self._await_grants(asked, deadline_s, say)
            rows = await asyncio.to_thread(self._rows)
        except BaseException:  # cancelled, or Ray failed: nothing of it may stay behind
            for group in asked.values():
                remove_placement_group(group)
            raise
        granted = [row for row in rows if row.name in asked and row.state == "CREATED"]
        for name in asked.keys() - {row.name for row in granted}:
            await asyncio.to_thread(remove_placement_group, asked[name])
        return sorted(map(_lease, granted), key=lambda lease: (lease.granted_at, lease.name))

    async def release(self, lease: Lease) -> float:
        return await asyncio.to_thread(remove_leases, lease.name)

    async def existing(self) -> list[Lease]:
        """Granted leases; requests that their coordinator did not live to see are cancelled."""
        rows = await asyncio.to_thread(self._rows)
        for row in rows:
            if row.state == "PENDING":
                await asyncio.to_thread(remove_placement_group, row.placement_group())
        return [_lease(row) for row in rows if row.state == "CREATED"]

    async def slots_of_others(self) -> dict[str, float]:
        return await asyncio.to_thread(self._slots_of_others)

    async def total_slots(self) -> int:
        return sum(self._slots_in(node.total) for node in await asyncio.to_thread(self._nodes))

    def _request(self, name: str) -> PlacementGroup:
        selector = [self._label_selector] if self._label_selector else None
        return placement_group(
            [self._bundle], name=name, lifetime="detached", bundle_label_selector=selector
        )

    async def _await_grants(
        self, asked: dict[str, PlacementGroup], deadline_s: float, say: Callable[[str], None]
    ) -> None:
        waits = {asyncio.ensure_future(_ready(group)) for group in asked.values()}
        pending, said = waits, ""
        try:
            while pending and (left_s := deadline_s - time.monotonic()) > 0:
                _, pending = await asyncio.wait(pending, timeout=min(left_s, _SAY_EVERY_S))
                if pending:
                    text = await asyncio.to_thread(self._explain, len(asked), set(asked))
                    if text != said:
                        say(text)
                        said = text
        finally:
            for wait in pending:
                wait.cancel()
            # A request that somebody removed ends its wait with an error; the table tells as much.
            await asyncio.gather(*waits, return_exceptions=True)

    def _explain(self, count: int, names: set[str]) -> str:
        waiting = [r for r in self._rows() if r.name in names and r.state != "CREATED"]
        states = Counter(row.scheduling_state for row in waiting)
        nodes = self._nodes()
        text = (
            f"waiting for {len(waiting)} of {count} leases of {self._bundle}: "
            f"{sum(self._slots_in(node.total) for node in nodes)} slots on {len(nodes)} node(s), "
            f"{sum(self._slots_in(node.available) for node in nodes)} free, "
            f"{sum(self._slots_of_others().values()):g} held by others; Ray says "
            + ", ".join(f"{state} for {n}" for state, n in sorted(states.items()))
        )
        if "INFEASIBLE" in states:
            text += "; no node can ever hold one: lower lease.resources or add a node"
        return text

    def _slots_of_others(self) -> dict[str, float]:
        """Totals less what is available less our bundles.

        The worker's accelerator counts where its bundle has one, else what is scarcest.
        """
        nodes = self._nodes()
        ours = self._rows()  # after the nodes: none that they show can be missing
        slots = {}
        for node in nodes:
            held = [
                (
                    node.total.get(name, 0.0)
                    - node.available.get(name, 0.0)
                    - sum(node.held_by(row, name) for row in ours)
                )
                / self._bundle[name]
                for name in self._scarce()
            ]
            slots[node.node_id] = max(0.0, *held)
        return slots

    def _scarce(self) -> list[str]:
        own = [name for name in self._bundle if name not in _NOT_WORKER_SPECIFIC]
        return own or list(self._bundle)

    def _slots_in(self, resources: Mapping[str, float]) -> int:
        # Ray counts in units of 1e-4: three bundles of 0.1 fit into 0.3.
        return int(min(resources.get(name, 0.0) / n + 1e-6 for name, n in self._bundle.items()))

    def _nodes(self) -> list[NodeRow]:
        return [node for node in read_nodes() if node.matches(self._label_selector)]

    def _rows(self) -> list[GroupRow]:
        return read_groups(self._prefix)


def remove_leases(prefix: str) -> float:
    """Remove the leases whose names begin so, and return the wall clock when all nodes have
    taken their bundles back. Blocks; idempotent.

    Raises:
        UnavailableError: Ray does not carry the removal out.
    """
    groups = [row for row in read_groups(prefix) if row.state != "REMOVED"]
    for row in groups:
        remove_placement_group(row.placement_group())
    deadline_s = time.monotonic() + _REMOVAL_BOUND_S
    while any(node.shows(row) for node in read_nodes() for row in groups):
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"{len(groups)} leases named {prefix}* were removed, but after "
                f"{_REMOVAL_BOUND_S:g} s their nodes still hold the bundles; look at the raylets"
            )
        time.sleep(_LOOK_EVERY_S)
    return time.time()


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _lease(row: GroupRow) -> Lease:
    requested_at = float(row.name.rsplit(".lease.", 1)[1].rsplit(".", 1)[0])
    return Lease(row.name, row.node_id, requested_at + row.creation_latency_s)
