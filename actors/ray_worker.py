"""The worker actor: a thin shell around ``actors.member.Member``.

It adds what only Ray knows (node, slot, pid) and ends its process after the member has left.
Calls that may take long have threads of their own, so that they never block ``submit``.
"""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.protocol import (
    BuildReport,
    FinalizeReport,
    LoadReport,
    PrepareReport,
    WorkerReport,
    WorkerSpec,
)
from actors.ray_weights import fetch_chunks
from actors.sample_kv import KvBySample
from placement.errors import MembershipError
from placement.ids import Generation, SampleId
from placement.membership import GroupChange
from placement.samples import Sample

MEMBER = "actors.member:Member"
"""Import path of the class that the shell hosts."""

CONCURRENCY_GROUPS = {
    "events": 2,  # a coordinator that came back must not wait for its predecessor's long poll
    "control": 4,  # build, prepare, discard, ...: seconds each, and a discard may cut a prepare
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set before the worker's process starts, for libraries that read it when they are imported."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """``slot``: the accelerator that Ray assigned ("GPU:2"), or ""."""

    node_id: str
    slot: str
    pid: int


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Importing an engine makes hundreds of thousands of objects that stay, and the collector
    looks through them again and again: without it the import takes a fifth less time. Frozen,
    they are not looked at later either, between the steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class WorkerShell:
    """What runs in the worker's process.

    Args:
        member: import path ("module:Class") of what it hosts; imported by ``build``.
    """

    def __init__(self, member: str) -> None:
        self._member_path = member
        self._member: Any = None

    def place(self) -> WorkerPlace:
        context = ray.get_runtime_context()
        slots = [
            f"{kind}:{','.join(ids)}" for kind, ids in context.get_accelerator_ids().items() if ids
        ]
        return WorkerPlace(context.get_node_id(), " ".join(slots), os.getpid())

    @ray.method(concurrency_group="control")
    def build(self, spec: WorkerSpec) -> BuildReport:
        module, _, name = self._member_path.partition(":")
        with _collecting_no_garbage():
            self._member = getattr(importlib.import_module(module), name)(spec)
            report: BuildReport = self._member.build()
        place = self.place()
        return replace(report, node_id=place.node_id, slot=place.slot, pid=place.pid)

    @ray.method(concurrency_group="control")
    def start(self) -> None:
        self._built().start()

    def submit(self, samples: list[Sample], kv: KvBySample | None = None) -> None:
        self._built().submit(samples, kv)

    @ray.method(concurrency_group="control", num_returns=2)
    def fetch_kv(self, sample_ids: list[SampleId]) -> tuple[dict[SampleId, int], KvBySample]:
        """Bytes per sample, and the KV itself: the caller of this owns both objects, so they
        outlive this process."""
        kv: KvBySample = self._built().fetch_kv(sample_ids)
        return {sample_id: one.num_bytes for sample_id, one in kv.items()}, kv

    @ray.method(concurrency_group="control")
    def hold(self) -> None:
        self._built().hold()

    @ray.method(concurrency_group="control")
    def unhold(self) -> None:
        self._built().unhold()

    @ray.method(concurrency_group="control")
    def load_weights(self, version: str, chunks: tuple[Any, ...], timeout_s: float) -> LoadReport:
        """``timeout_s``: bound on the fetch of each chunk."""
        report: LoadReport = self._built().load_weights(version, fetch_chunks(chunks, timeout_s))
        return report

    def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        self._built().cancel(sample_ids, keep_kv)

    @ray.method(concurrency_group="events")
    def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        return self._built().collect(acknowledged, wait_s)

    @ray.method(concurrency_group="control")
    def prepare(self, change: GroupChange) -> PrepareReport:
        return self._built().prepare(change)

    @ray.method(concurrency_group="control")
    def discard(self, generation: Generation) -> None:
        self._built().discard(generation)

    @ray.method(concurrency_group="control")
    def switch(self, generation: Generation) -> None:
        self._built().switch(generation)

    @ray.method(concurrency_group="control")
    def finalize(self, generation: Generation) -> FinalizeReport:
        return self._built().finalize(generation)

    @ray.method(concurrency_group="control")
    def rollback(self, generation: Generation) -> None:
        self._built().rollback(generation)

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """Does not return: the caller sees this actor end."""
        if self._member is not None:
            self._member.leave()
        # Not exit_actor: that waits for calls in flight, such as the coordinator's long poll.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _built(self) -> Any:
        if self._member is None:
            raise MembershipError("this worker has not been built; call build first")
        return self._member
