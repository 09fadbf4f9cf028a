"""The keeper of the weights as a Ray actor, and the coordinator's side of it.

Detached and named, so that it outlives workers and coordinators. Chunks lie in the object store
of its node, are fetched from there by whoever loads them, and are gone with the actor: it is not
restarted, because a restarted one would be empty. It is started when weights come for the first
time; before that the checkpoint's directory is all there is.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.control_api import WeightsGroup, WeightUpdate
from actors.ray_answers import await_answer, first_line
from actors.ray_teardown import KEEPER_NAME, find_actor
from actors.weights_keeper import KeptWeights, StagedWeights
from placement.errors import RequestError, UnavailableError, WeightUpdateError

_ANSWER_TIMEOUT_S = 60.0
"""A call that reads nothing takes milliseconds; the first one waits for a process and its
imports."""


class _ObjectStoreShelf:
    """``Shelf``: a handle is Ray's reference."""

    def put(self, chunk: Any) -> "ObjectRef[Any]":
        return ray.put(chunk)

    def get(self, handle: "ObjectRef[Any]") -> Any:
        return ray.get(handle)


class KeeperShell:
    """What runs in the keeper's process. Groups are joined on a thread of their own, because a
    meeting waits for the trainer; questions are answered on another while weights are read."""

    def __init__(self, directory: str, timeout_s: float) -> None:
        # Not at the top: those who only call the keeper must not pay seconds for torch.
        from actors.published_weights import PublishedWeights  # noqa: PLC0415
        from actors.weights_group import TrainerGroups  # noqa: PLC0415

        def fetch(reference: Any) -> Any:
            if not isinstance(reference, ObjectRef):
                return reference
            try:
                return ray.get(reference, timeout=timeout_s)
            except (RayError, GetTimeoutError) as error:
                raise RequestError(
                    f"an object could not be had within {timeout_s:g} s: {first_line(error)}; its "
                    "owner has to live until the update has ended",
                    field="source.objects",
                ) from error

        self._groups = TrainerGroups(timeout_s)
        self._weights = PublishedWeights(directory, _ObjectStoreShelf(), fetch, self._groups)

    @ray.method(concurrency_group="questions")
    def kept(self) -> KeptWeights:
        return self._weights.kept()

    def restore(self, path: str, version: str, digest: str) -> KeptWeights:
        return self._weights.restore(path, version, digest)

    def stage(self, update: WeightUpdate, current: str) -> StagedWeights:
        return self._weights.stage(update, current)

    def commit(self, version: str) -> KeptWeights:
        return self._weights.commit(version)

    def drop(self) -> None:
        self._weights.drop()

    @ray.method(concurrency_group="groups")
    def join_group(self, group: WeightsGroup) -> None:
        self._groups.join(group)

    @ray.method(concurrency_group="groups")
    def leave_group(self, name: str) -> None:
        self._groups.leave(name)


class RayWeightsKeeper:
    """``WeightsKeeper`` over the actor.

    Args:
        find_or_start: the actor's handle; blocks.
        find: the same of one that lives.
        timeout_s: bound on a call that reads, receives or meets.
    """

    def __init__(
        self,
        find_or_start: Callable[[], ActorHandle],
        find: Callable[[], ActorHandle | None],
        timeout_s: float,
    ) -> None:
        self._find_or_start = find_or_start
        self._find = find
        self._timeout_s = timeout_s + _ANSWER_TIMEOUT_S

    async def kept(self) -> KeptWeights:
        return await self._call("kept", _ANSWER_TIMEOUT_S)

    async def existing(self) -> KeptWeights | None:
        if await asyncio.to_thread(self._find) is None:
            return None
        return await self.kept()

    async def restore(self, path: str, version: str, digest: str) -> KeptWeights:
        return await self._call("restore", self._timeout_s, path, version, digest)

    async def stage(self, update: WeightUpdate, current: str) -> StagedWeights:
        return await self._call("stage", self._timeout_s, update, current)

    async def commit(self, version: str) -> KeptWeights:
        return await self._call("commit", _ANSWER_TIMEOUT_S, version)

    async def drop(self) -> None:
        await self._call("drop", _ANSWER_TIMEOUT_S)

    async def join_group(self, group: WeightsGroup) -> None:
        await self._call("join_group", self._timeout_s, group)

    async def leave_group(self, name: str) -> None:
        await self._call("leave_group", _ANSWER_TIMEOUT_S, name)

    async def _call(self, method: str, bound_s: float, *args: Any) -> Any:
        handle = await asyncio.to_thread(self._find_or_start)
        ref = getattr(handle, method).remote(*args)
        who = "the keeper of the weights"
        try:
            return await await_answer(ref, bound_s, who=who, what=method, lost=UnavailableError)
        except RayTaskError as error:
            raise UnavailableError(
                f"{who} failed in {method} with {first_line(error.cause)}; its log has the trace"
            ) from error


def weights_keeper(
    namespace: str,
    directory: str,
    timeout_s: float,
    resources: Mapping[str, float] = MappingProxyType({}),
) -> RayWeightsKeeper:
    """The keeper of this namespace, which is started on a node with ``resources`` when it is
    called first and there is none."""
    actor = ray.remote(concurrency_groups={"groups": 1, "questions": 1})(KeeperShell).options(
        name=KEEPER_NAME,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        resources=dict(resources),
    )
    return RayWeightsKeeper(
        lambda: actor.remote(directory, timeout_s),
        lambda: find_actor(KEEPER_NAME, namespace),
        timeout_s,
    )


def fetch_chunks(references: tuple[Any, ...], timeout_s: float) -> Iterator[Any]:
    """Chunk after chunk, each when it is asked for.

    Raises:
        WeightUpdateError: one is not to be had: the keeper has ended, or the network is too slow.
    """
    for number, reference in enumerate(references):
        try:
            yield ray.get(reference, timeout=timeout_s)
        except (RayError, GetTimeoutError) as error:
            raise WeightUpdateError(
                f"chunk {number} of {len(references)} could not be had within {timeout_s:g} s: "
                f"{first_line(error)}"
            ) from error
