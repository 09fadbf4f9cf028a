"""The committed version of the weights, held in full outside the workers, and what is to follow it.

Chunks lie on a shelf (Ray's object store, or a list), so that workers fetch them from there. For
the checkpoint's own version nothing is held: it lies on disk. The first update makes a full copy.
While an update is staged, the chunks that it changes exist twice.

Invariants: what is committed is whole, or the checkpoint's; what was staged and not committed is
dropped before anything else is staged.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from actors.checkpoint_files import open_checkpoint
from actors.control_api import DiskWeights, WeightUpdate
from actors.migration import checksum
from actors.weight_chunks import CHUNK_BYTES, TensorSpec, WeightChunk, make_chunk, plan_chunks
from actors.weight_sources import Fetch, NewTensors, read_source
from actors.weights_group import TrainerGroups
from actors.weights_keeper import CHECKPOINT_VERSION, KeptWeights, StagedWeights
from placement.errors import RequestError, UnavailableError


class Shelf(Protocol):
    """Where chunks lie; one that no handle refers to any more is gone."""

    def put(self, chunk: WeightChunk) -> Any: ...

    def get(self, handle: Any) -> WeightChunk: ...


class PublishedWeights:
    """Args:
    directory: of the checkpoint.
    fetch: what a reference in ``ObjectWeights`` stands for.
    groups: over which trainers broadcast.

    Raises:
        RequestError: the checkpoint has no safetensors files.
    """

    def __init__(
        self,
        directory: str,
        shelf: Shelf,
        fetch: Fetch,
        groups: TrainerGroups,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._shelf = shelf
        self._fetch = fetch
        self._groups = groups
        self._checkpoint = open_checkpoint(directory, "model.path")
        self._plan = plan_chunks(self._checkpoint.specs.values(), chunk_bytes)
        self._committed: tuple[str, list[Any]] = (CHECKPOINT_VERSION, [])
        self._parts: NewTensors | None = None
        self._staged: tuple[str, list[Any]] | None = None

    def kept(self) -> KeptWeights:
        """May be called beside everything else."""
        num_bytes = sum(spec.num_bytes for chunk in self._plan for spec in chunk)
        version, chunks = self._committed
        return KeptWeights(version, tuple(chunks), num_bytes if chunks else 0)

    def restore(self, path: str, version: str, digest: str) -> KeptWeights:
        """Raises: RequestError: other weights lie there now, or none."""
        update = WeightUpdate(DiskWeights(path), version)
        new = self._read(update)
        missing = self._checkpoint.specs.keys() - new.names
        if missing:
            raise RequestError(
                f"{path} lacks {len(missing)} tensors, {min(missing)} among them",
                field="source.path",
            )
        chunks, found = [], ""
        for specs in self._plan:
            chunk = self._make(specs, new, None)
            found = _digest(found, chunk)
            chunks.append(self._shelf.put(chunk))
        if found != digest:
            raise RequestError(
                f"what lies in {path} has checksum {found}; version {version}, which was read "
                f"from there, had {digest}",
                field="source.path",
            )
        self._committed = (version, chunks)
        self.drop()
        return self.kept()

    def _read(self, update: WeightUpdate) -> NewTensors:
        return read_source(update, self._checkpoint.specs, self._fetch, self._groups.receive)

    def stage(self, update: WeightUpdate, current: str) -> StagedWeights:
        """An update, or a part of one: with the last part all of them are staged.

        Raises:
            RequestError: it is wrong; earlier parts are kept.
        """
        if update.first:
            self.drop()
        elif self._parts is None:
            raise RequestError(
                f"no earlier part of version {update.version} is here; begin with a first one",
                field="first",
            )
        started = time.perf_counter()
        part = self._read(update)
        new = part if self._parts is None else self._parts.followed_by(part)
        received = time.perf_counter()
        phases_s = {"receive": received - started}
        if not update.last:
            self._parts = new
            return StagedWeights(update.version, (), (), part.num_bytes, phases_s)
        if not new.names:
            raise RequestError("holds no tensor", field="source")
        staged = self._stage_all(update, new, current)
        self._parts = None
        return replace(staged, phases_s={**phases_s, "stage": time.perf_counter() - received})

    def _stage_all(self, update: WeightUpdate, new: NewTensors, current: str) -> StagedWeights:
        before = self._before(current)
        if before is None:
            self._refuse_a_part(new, update, current)
        at_once_from_disk = (
            isinstance(update.source, DiskWeights) and update.base_version is None and update.first
        )
        found_again = at_once_from_disk and new.names == self._checkpoint.specs.keys()
        whole, digest, changed = [], "", []
        for i, specs in enumerate(self._plan):
            if new.names.isdisjoint(spec.name for spec in specs):
                assert before is not None
                whole.append(before(i))
                continue
            chunk = self._make(specs, new, None if before is None else before(i))
            if found_again:
                digest = _digest(digest, chunk)
            whole.append(self._shelf.put(chunk))
            changed.append(i)
        self._staged = (update.version, whole)
        return StagedWeights(
            update.version,
            tuple(whole[i] for i in changed),
            None if before is None else tuple(before(i) for i in changed),
            new.num_bytes,
            {},
            digest,
        )

    def _before(self, current: str) -> Callable[[int], Any] | None:
        """Handles of the current version's chunks; None: they are not here any more."""
        version, chunks = self._committed
        if current == version and chunks:
            return chunks.__getitem__
        if current != CHECKPOINT_VERSION:
            return None
        read: dict[int, Any] = {}

        def from_checkpoint(i: int) -> Any:
            if i not in read:
                specs = self._plan[i]
                tensors = {spec.name: self._checkpoint.read(spec.name) for spec in specs}
                read[i] = self._shelf.put(make_chunk(specs, tensors))
            return read[i]

        return from_checkpoint

    def _refuse_a_part(self, new: NewTensors, update: WeightUpdate, current: str) -> None:
        missing = self._checkpoint.specs.keys() - new.names
        if missing or update.base_version is not None:
            raise RequestError(
                f"the full copy of version {current} was lost with the process that held it, so "
                "nothing can be built on it: send all tensors whole",
                field="base_version" if update.base_version is not None else "source",
            )

    def _make(
        self, specs: tuple[TensorSpec, ...], new: NewTensors, before: Any | None
    ) -> WeightChunk:
        """A chunk of ``new`` where that has something, else of the chunk ``before``."""
        old: dict[str, torch.Tensor] = {}

        def old_tensor(name: str) -> torch.Tensor:
            if not old:
                old.update(self._shelf.get(before).tensors())
            return old[name]

        tensors = {}
        for spec in specs:
            get_old = partial(old_tensor, spec.name)
            there = spec.name in new.names
            tensors[spec.name] = new.get(spec.name, get_old) if there else get_old()
        return make_chunk(specs, tensors)

    def commit(self, version: str) -> KeptWeights:
        """Raises: UnavailableError: it was not staged here."""
        if self._staged is None or self._staged[0] != version:
            raise UnavailableError(f"version {version} is not staged any more; send it again")
        self._committed, self._staged = self._staged, None
        return self.kept()

    def drop(self) -> None:
        self._parts = self._staged = None


def _digest(so_far: str, chunk: WeightChunk) -> str:
    """Of the chunks up to this one."""
    after = int(so_far or "0", 16) * 31 + checksum(torch.from_numpy(chunk.buffer))
    return f"{after % (1 << 64):016x}"
