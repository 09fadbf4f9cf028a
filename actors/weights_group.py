"""A torch.distributed group between a trainer and the service, over which weights are broadcast.

It is formed as trainers form one beside their default group: a TCP store at the address, under the
group's name. Both sides can call ``join``. Written for torch 2.13, see ``actors.groups``.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from actors.control_api import GroupWeights, WeightsGroup
from actors.weight_chunks import TensorSpec
from placement.errors import RequestError, UnknownIdError

TRAINER_RANK = 0

_BACKENDS = ("gloo", "nccl")


def _check(group: WeightsGroup) -> None:
    """Raises: RequestError."""
    if group.backend not in _BACKENDS:
        raise RequestError(f"is {group.backend!r}; use one of {_BACKENDS}", field="backend")
    if group.backend == "nccl" and not torch.cuda.is_available():
        raise RequestError(
            "is 'nccl', and the process that receives weights has no GPU; use 'gloo'",
            field="backend",
        )
    if group.world_size < 2:
        raise RequestError(
            f"is {group.world_size}; the trainer and the service are two", field="world_size"
        )
    if not 0 < group.rank_offset < group.world_size:
        raise RequestError(
            f"is {group.rank_offset}; the trainer is rank {TRAINER_RANK}, the service one of 1 to "
            f"{group.world_size - 1}",
            field="rank_offset",
        )
    if not 0 < group.port < 1 << 16:
        raise RequestError(f"is {group.port}; a port is 1 to 65535", field="port")
    if not group.name or not group.host:
        raise RequestError("is empty", field="name" if not group.name else "host")


class JoinedGroup:
    """This process's place in a weights group."""

    def __init__(self, group: WeightsGroup, rank: int, timeout_s: float) -> None:
        """Returns when all ranks have come.

        Raises:
            RequestError: they have not, within ``timeout_s``.
        """
        self._spec = group
        self._device = "cuda" if group.backend == "nccl" else "cpu"
        timeout = timedelta(seconds=timeout_s)
        address = f"tcp://{group.host}:{group.port}"
        try:
            meeting = rendezvous(address, rank, group.world_size, timeout=timeout)
            self._store, _, _ = next(meeting)
            self._store.set_timeout(timeout)
            self._group, _ = c10d._new_process_group_helper(
                group.world_size,
                rank,
                [],
                c10d.Backend(group.backend),
                dist.PrefixStore(group.name, self._store),
                c10d.GroupName(group.name),
                timeout=timeout,
            )
            c10d._world.pg_group_ranks[self._group] = {i: i for i in range(group.world_size)}
        except (RuntimeError, ValueError, OSError) as error:  # torch's, on a peer that is not there
            raise RequestError(
                f"the {group.world_size} ranks of group {group.name!r} did not meet at {address} "
                f"within {timeout_s:g} s: {error}",
                field="host",
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the trainer to everybody; returns it on the CPU.

        Raises: RuntimeError: a peer has gone, or the group's bound has passed.
        """
        there = tensor.to(self._device).contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER_RANK
        self._group.broadcast([there], options).wait()
        return there.cpu()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class TrainerGroups:
    """The groups that this process receives over.

    Args:
        timeout_s: bound on a meeting, and on each broadcast.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._groups: dict[str, JoinedGroup] = {}

    def join(self, group: WeightsGroup) -> None:
        """Raises: RequestError."""
        _check(group)
        if group.name in self._groups:
            raise RequestError(
                f"a group {group.name!r} is there already; destroy it first", field="name"
            )
        self._groups[group.name] = JoinedGroup(group, group.rank_offset, self._timeout_s)

    def leave(self, name: str) -> None:
        """Raises: UnknownIdError."""
        group = self._groups.pop(name, None)
        if group is None:
            raise UnknownIdError(f"there is no group {name!r}; {self._known()}", field="name")
        group.close()

    def receive(self, source: GroupWeights) -> dict[str, torch.Tensor]:
        """Raises: RequestError: there is no such group, or the trainer broke off."""
        group = self._groups.get(source.group)
        if group is None:
            raise RequestError(
                f"there is no group {source.group!r}; {self._known()}; init one",
                field="source.group",
            )
        try:
            return {
                spec.name: group.broadcast(torch.empty(spec.shape, dtype=spec.torch_dtype))
                for spec in map(TensorSpec, source.names, source.dtypes, source.shapes)
            }
        except RuntimeError as error:  # torch's: a peer has gone, or the bound has passed
            self.leave(source.group)  # late messages would be taken for the next ones
            raise RequestError(
                f"the trainer's broadcasts broke off: {error}; the group was left, init it again",
                field="source.group",
            ) from error

    def _known(self) -> str:
        return f"there are {sorted(self._groups)}" if self._groups else "there are none"
