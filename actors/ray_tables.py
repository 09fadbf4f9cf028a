"""What Ray's tables say about nodes, placement groups and actors, as frozen records.

The one module that reads Ray's state without its dashboard. ``ray.nodes``,
``placement_group_table`` and the per-node resource functions are marked as API by Ray 2.60 (the
last two live in ``ray._private.state`` all the same); the actor table is not, and is the only
one that knows the pid of a process that no longer answers. All calls block for 1-3 ms.

A granted bundle is taken off its node's available resources at once; about 90 ms later the node
shows resources of its own for it, such as ``GPU_group_<placement group id>``. A removed one reads
REMOVED at once, but the node holds it until those resources disappear, again up to 100 ms later.
So the group's state says when a bundle begins, and what the node shows says when it ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group_table

_READ_TRIES = 5


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A placement group of one bundle.

    Attributes:
        bundle: the resources asked for.
        state: PENDING, PREPARED, CREATED, RESCHEDULING or REMOVED.
        scheduling_state: why it is pending (NO_RESOURCES, INFEASIBLE, ...).
        creation_latency_s: from the request to the grant; 0 before.
    """

    name: str
    group_id: str
    bundle: Mapping[str, float]
    state: str
    scheduling_state: str
    node_id: str
    creation_latency_s: float

    def placement_group(self) -> PlacementGroup:
        """Ray's object for it: a lookup by name would depend on the caller's namespace."""
        return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(self.group_id)))


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A living node. ``total`` and ``available`` hold the bundles' own resources too."""

    node_id: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    available: Mapping[str, float]

    def held_by(self, group: GroupRow, resource: str) -> float:
        """How much of ``resource`` the placement group holds on this node."""
        if group.node_id == self.node_id and group.state in {"PREPARED", "CREATED"}:
            return group.bundle.get(resource, 0.0)
        return self.total.get(f"{resource}_group_{group.group_id}", 0.0)

    def shows(self, group: GroupRow) -> bool:
        """The node has the bundle, or has not yet taken it back."""
        return f"bundle_group_{group.group_id}" in self.total

    def matches(self, selector: Mapping[str, str]) -> bool:
        """The node's labels are as a label selector in Ray's own notation wants them."""
        return all(_accepts(self.labels.get(key), wanted) for key, wanted in selector.items())

    @property
    def has_accelerator(self) -> bool:
        """Ray detected one; logical GPUs, declared on a machine without, do not count."""
        return any(resource.startswith("accelerator_type:") for resource in self.total)


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """The process of an actor. ``state`` DEAD does not yet mean that the pid has gone."""

    node_id: str
    pid: int
    state: str


def read_groups(prefix: str) -> list[GroupRow]:
    """Placement groups, in any namespace, whose name starts with ``prefix``."""
    return [
        GroupRow(
            name=row["name"],
            group_id=group_id,
            bundle=row["bundles"].get(0, {}),
            state=row["state"],
            scheduling_state=row["stats"]["scheduling_state"],
            node_id=row["bundles_to_node_id"].get(0, ""),
            creation_latency_s=row["stats"]["end_to_end_creation_latency_ms"] / 1e3,
        )
        for group_id, row in placement_group_table().items()
        if row["name"].startswith(prefix)
    ]


def read_nodes() -> list[NodeRow]:
    """Living nodes, in the order of their ids. ``total`` and ``available`` are of one moment,
    unless the cluster changes faster than it can be read."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    available = ray_state.available_resources_per_node()
    for _ in range(_READ_TRIES):
        before = available
        total = ray_state.total_resources_per_node()
        available = ray_state.available_resources_per_node()
        if available == before:
            break
    return [
        NodeRow(node_id, labels[node_id], total[node_id], available.get(node_id, {}))
        for node_id in sorted(labels)
        if node_id in total
    ]


def read_process(handle: ActorHandle) -> ProcessRow | None:
    """Where the actor runs or ran; None if it never got a process."""
    row = ray_state.actors(handle._actor_id.hex())
    if not row or not row["Pid"]:
        return None
    return ProcessRow(row["Address"]["NodeID"], row["Pid"], row["State"])


def _accepts(label: str | None, wanted: str) -> bool:
    """``value``, ``!value``, ``in(a,b)`` or ``!in(a,b)``; a missing label is not any value."""
    negated = wanted.startswith("!")
    value = wanted.removeprefix("!")
    if value.startswith("in(") and value.endswith(")"):
        values = [choice.strip() for choice in value[3:-1].split(",")]
    else:
        values = [value]
    return (label in values) != negated
