"""Where new weights come from: files, objects of another process, a group that broadcasts.

Each source becomes ``NewTensors``, whole ones or a delta, checked against the checkpoint's names,
types and shapes before anything is made of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from actors import sparse_delta
from actors.checkpoint_files import open_checkpoint
from actors.control_api import (
    DiskWeights,
    GroupWeights,
    ObjectWeights,
    SparseTensor,
    WeightUpdate,
)
from actors.weight_chunks import TensorSpec
from placement.errors import RequestError

_SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True)
class NewTensors:
    """``get(name)``: the new tensor, given the one before (asked for where it is needed)."""

    names: frozenset[str]
    num_bytes: int
    get: Callable[[str, Callable[[], torch.Tensor]], torch.Tensor]

    def followed_by(self, later: "NewTensors") -> "NewTensors":
        """Both, the later ones upon the earlier."""

        def get(name: str, before: Callable[[], torch.Tensor]) -> torch.Tensor:
            if name not in later.names:
                return self.get(name, before)
            there = name in self.names
            return later.get(name, partial(self.get, name, before) if there else before)

        names, num_bytes = self.names | later.names, self.num_bytes + later.num_bytes
        return NewTensors(names, num_bytes, get)


Fetch = Callable[[Any], Any]
"""A reference to an object -> the object."""

Receive = Callable[[GroupWeights], dict[str, torch.Tensor]]
"""All tensors that a group's trainer broadcasts."""


def read_source(
    update: WeightUpdate, specs: Mapping[str, TensorSpec], fetch: Fetch, receive: Receive
) -> NewTensors:
    """Raises: RequestError: the source cannot be had, or is not of this checkpoint."""
    if update.base_version is not None:
        return _changed(_read_delta(update, specs, fetch, receive), specs, update.checksum)
    source = update.source
    if isinstance(source, DiskWeights):
        files = open_checkpoint(source.path, "source.path")
        for spec in files.specs.values():
            _check(spec, specs, "source.path")
        return NewTensors(
            frozenset(files.specs),
            sum(spec.num_bytes for spec in files.specs.values()),
            lambda name, _before: files.read(name),
        )
    if isinstance(source, ObjectWeights):
        tensors = _fetch_all(source, fetch, _as_tensors)
        return _whole(tensors, specs, "source.objects")
    _check_announced(source, specs, _check)
    return _whole(receive(source) if source.names else {}, specs, "source.names")


def _read_delta(
    update: WeightUpdate, specs: Mapping[str, TensorSpec], fetch: Fetch, receive: Receive
) -> dict[str, SparseTensor]:
    source = update.source
    if isinstance(source, DiskWeights):
        files = open_checkpoint(source.path, "source.path")
        return sparse_delta.from_tensors({name: files.read(name) for name in files.specs})
    if isinstance(source, ObjectWeights):
        return _fetch_all(source, fetch, _as_delta)
    _check_announced(source, specs, _check_delta)
    return sparse_delta.from_tensors(receive(source) if source.names else {})


def _fetch_all(
    source: ObjectWeights, fetch: Fetch, read: Callable[[Any, str], dict[str, Any]]
) -> dict[str, Any]:
    """All objects as one mapping."""
    found: dict[str, Any] = {}
    for i, reference in enumerate(source.objects):
        field = f"source.objects[{i}]"
        for name, value in read(fetch(reference), field).items():
            if name in found:
                raise RequestError(f"{name} comes twice", field=field)
            found[name] = value
    return found


def _as_tensors(content: Any, field: str) -> dict[str, torch.Tensor]:
    if isinstance(content, bytes):
        try:
            tensors: dict[str, torch.Tensor] = load(content)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise RequestError(
                f"{len(content)} bytes are no safetensors file: {error}", field=field
            ) from error
        return tensors
    return _as_mapping(content, torch.Tensor, field)


def _as_delta(content: Any, field: str) -> dict[str, SparseTensor]:
    if isinstance(content, bytes):
        return sparse_delta.from_bytes(content)
    return _as_mapping(content, SparseTensor, field)


def _as_mapping(content: Any, kind: type, field: str) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise RequestError(
            f"is a {type(content).__name__}; send a mapping of names to {kind.__name__}, or the "
            "bytes of a safetensors file",
            field=field,
        )
    for name, value in content.items():
        if not isinstance(value, kind):
            raise RequestError(
                f"{name} is a {type(value).__name__}; send a {kind.__name__}", field=field
            )
    return dict(content)


def _check_announced(
    source: GroupWeights,
    specs: Mapping[str, TensorSpec],
    check: Callable[[TensorSpec, Mapping[str, TensorSpec], str], None],
) -> None:
    """Before anything is received: the trainer would broadcast into the void."""
    if not len(source.names) == len(source.dtypes) == len(source.shapes):
        raise RequestError(
            f"{len(source.names)} names, {len(source.dtypes)} dtypes and {len(source.shapes)} "
            "shapes; send one of each per tensor",
            field="source.names",
        )
    if len(set(source.names)) < len(source.names):
        raise RequestError("a name comes twice", field="source.names")
    for i, announced in enumerate(zip(source.names, source.dtypes, source.shapes, strict=True)):
        check(TensorSpec(*announced), specs, f"source.names[{i}]")


def _whole(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], field: str
) -> NewTensors:
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        _check(TensorSpec(name, dtype, tuple(tensor.shape)), specs, field)
    return NewTensors(
        frozenset(tensors),
        sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
        lambda name, _before: tensors[name].detach().cpu(),
    )


def _changed(
    delta: Mapping[str, SparseTensor], specs: Mapping[str, TensorSpec], checksum: str
) -> NewTensors:
    for name in delta:
        if name not in specs:
            raise _unknown(name, specs, "source")
    if checksum and (found := sparse_delta.checksum(delta)) != checksum:
        raise RequestError(
            f"is {checksum}, and what came has {found}; send the delta again", field="checksum"
        )
    return NewTensors(
        frozenset(delta),
        sum(
            tensor.numel() * tensor.itemsize
            for changed in delta.values()
            for tensor in (changed.indices, changed.values)
        ),
        lambda name, before: sparse_delta.apply_to(before(), name, delta[name]),
    )


def _check(spec: TensorSpec, specs: Mapping[str, TensorSpec], field: str) -> None:
    known = specs.get(spec.name)
    if known is None:
        raise _unknown(spec.name, specs, field)
    if known != spec:
        raise RequestError(
            f"{spec.name} is {spec.dtype} {spec.shape}; the checkpoint has {known.dtype} "
            f"{known.shape}; send that",
            field=field,
        )


def _check_delta(spec: TensorSpec, specs: Mapping[str, TensorSpec], field: str) -> None:
    """One of the two tensors that a delta has for a changed one."""
    name, _, part = spec.name.rpartition(":")
    known = specs.get(name)
    if known is None or f":{part}" not in (sparse_delta.GAPS, sparse_delta.VALUES):
        raise _unknown(name or spec.name, specs, field)
    dtypes = sparse_delta.GAP_DTYPES if f":{part}" == sparse_delta.GAPS else (known.dtype,)
    # A gap takes a unit, and one more for every 255 elements that it passes over.
    most = known.numel + known.numel // 255 + 1
    if spec.dtype not in dtypes or len(spec.shape) != 1 or not 0 <= spec.shape[0] <= most:
        raise RequestError(
            f"{spec.name} is {spec.dtype} {spec.shape}; it is to be one of {dtypes}, flat, with up "
            f"to {most} elements",
            field=field,
        )


def _unknown(name: str, specs: Mapping[str, TensorSpec], field: str) -> RequestError:
    shown = ", ".join(list(specs)[:_SHOWN_NAMES])
    return RequestError(
        f"{name} is not a tensor of the checkpoint; its {len(specs)} names are like {shown}",
        field=field,
    )
