"""Process groups over any set of workers, formed and retired while others live on.

torch.distributed ties groups to a world of fixed size. Here the world is a placeholder that
does nothing (4,096 ids, none of which has to exist), and each generation gets groups of its
own over the worker ids that it consists of, rendezvousing under its own prefix in a store
that lives outside the workers. Names are explicit, so nothing depends on how many groups
there were before.

Written for torch 2.13: ``_new_process_group_helper`` and ``_world`` are private there.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from placement.ids import Generation, WorkerId

MAX_WORKER_IDS = 1 << 16
"""Worker ids are ranks of the placeholder world and are never reused: enough for one new
worker a minute over six weeks."""

NO_PEERS = "fake"
"""Backend of groups without a real peer: every collective returns at once."""


def enter_placeholder_world(worker_id: WorkerId) -> None:
    """Give this process its rank, which is its worker id, in a world that does nothing."""
    dist.init_process_group(NO_PEERS, store=FakeStore(), rank=worker_id, world_size=MAX_WORKER_IDS)


def connect_store(address: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(
        address[0], address[1], is_master=False, timeout=timedelta(seconds=timeout_s)
    )


def form_group(
    name: str,
    members: tuple[WorkerId, ...],
    worker_id: WorkerId,
    backend: str,
    store: dist.Store,
    timeout_s: float,
) -> dist.ProcessGroup:
    """A group over ``members``, in rank order; returns when all of them have come.

    A group of one has no peers and gets the backend that does nothing.
    """
    if len(members) == 1:
        backend = NO_PEERS
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(worker_id),
        list(members),
        c10d.Backend(backend),
        dist.PrefixStore(f"{name}/", store),
        c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
        group_desc=name,
    )
    c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(members)}
    return group


@dataclass(frozen=True, slots=True)
class GenerationGroups:
    """The groups of one membership as one member sees them.

    Attributes:
        host: for control words and host tensors (gloo).
        device: for the model's collectives; the same group as ``host`` where the model runs
            on the CPU.
        imagined: there are no peers behind them.
    """

    generation: Generation
    members: tuple[WorkerId, ...]
    host: dist.ProcessGroup
    device: dist.ProcessGroup
    imagined: bool = False

    def retire(self) -> None:
        """Close the groups. Peers that are still in a collective get an error at once."""
        dist.destroy_process_group(self.host)
        if self.device is not self.host:
            dist.destroy_process_group(self.device)


def form_generation(
    generation: Generation,
    members: tuple[WorkerId, ...],
    worker_id: WorkerId,
    device_backend: str,
    store: dist.Store,
    timeout_s: float,
) -> GenerationGroups:
    """The groups of ``generation``; returns when all members have come.

    On CPUs one gloo group serves everything. On GPUs the device group is NCCL's.
    """
    host = form_group(f"g{generation}", members, worker_id, "gloo", store, timeout_s)
    device = host
    if device_backend != "gloo":
        device = form_group(
            f"g{generation}.device", members, worker_id, device_backend, store, timeout_s
        )
    return GenerationGroups(generation, members, host, device)


def imagine_group(
    name: str, members: tuple[WorkerId, ...], worker_id: WorkerId
) -> dist.ProcessGroup:
    """A group of the right size and rank that has no peers."""
    return form_group(name, members, worker_id, NO_PEERS, FakeStore(), timeout_s=1)


def imagine_generation(
    generation: Generation, members: tuple[WorkerId, ...], worker_id: WorkerId
) -> GenerationGroups:
    """The groups in which a worker builds its engine, alone."""
    group = imagine_group("imagined", members, worker_id)
    return GenerationGroups(generation, members, group, group, imagined=True)
