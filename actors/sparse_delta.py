"""Sparse deltas: which elements of which tensors have other values, exactly.

A step of reinforcement learning changes few bits of bfloat16 weights, so what changed is far
smaller than the weights. Values replace values, nothing is added: the result is bit for bit what
the sender has.

As a file a delta is a safetensors file with two tensors for each changed one::

    <name>:gaps     how many unchanged elements lie before each changed one
    <name>:values   the new elements, in the tensor's own type

A gap is written in the elements of an unsigned type whose largest value M stands for "M more, and
go on": a gap g is floor(g / M) times M, then g mod M. The type (8, 16 or 32 bits) is the one that
takes the fewest bytes. So positions ascend without repetition by construction, and a hundredth of
a tensor takes 1 byte and a bit per position. A delta between processes over a group has the same
tensors under the same names.

Invariant: nothing that comes from outside is executed (there is no pickle), and whatever is wrong
with it is a ``RequestError`` that names the tensor.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from actors.control_api import SparseTensor
from placement.errors import RequestError

GAPS, VALUES = ":gaps", ":values"

_GAP_TYPES: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
}

GAP_DTYPES = ("uint8", "uint16", "uint32")

Delta = Mapping[str, SparseTensor]
"""Name -> its changed elements; tensors without any are left out."""


def make_delta(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> dict[str, SparseTensor]:
    """What turns ``old`` into ``new``, by their bits (a NaN equals itself, 0 is not -0)."""
    delta = {}
    for name, tensor in new.items():
        before = old[name]
        if before.dtype != tensor.dtype or before.shape != tensor.shape:
            raise RequestError(
                f"{name} was {before.dtype} {tuple(before.shape)} and is {tensor.dtype} "
                f"{tuple(tensor.shape)}; a delta needs the same type and shape",
                field=name,
            )
        indices = torch.nonzero(_bits(before) != _bits(tensor)).flatten()
        if indices.numel():
            delta[name] = SparseTensor(indices, tensor.reshape(-1)[indices])
    return delta


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.contiguous().view(-1).view(width)


def apply_to(base: torch.Tensor, name: str, changed: SparseTensor) -> torch.Tensor:
    """``base`` with the changed elements, as a new tensor.

    Raises:
        RequestError: ``changed`` does not fit ``base``.
    """
    indices, values = changed.indices, changed.values
    for what, tensor in (("indices", indices), ("values", values)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            raise RequestError(f"the {what} of {name} are no flat tensor", field=name)
    if indices.dtype != torch.int64 or values.dtype != base.dtype:
        raise RequestError(
            f"{name} has {base.dtype} elements; its delta has {values.dtype} values at "
            f"{indices.dtype} indices; send int64 indices and values of the tensor's type",
            field=name,
        )
    if indices.numel() != values.numel():
        raise RequestError(
            f"{name} has {indices.numel()} indices and {values.numel()} values", field=name
        )
    if indices.numel():
        if not bool((indices[1:] > indices[:-1]).all()):
            raise RequestError(f"the indices of {name} do not ascend", field=name)
        if int(indices[0]) < 0 or int(indices[-1]) >= base.numel():
            raise RequestError(
                f"the indices of {name} go from {int(indices[0])} to {int(indices[-1])}; it has "
                f"{base.numel()} elements",
                field=name,
            )
    result = base.detach().clone().contiguous()
    result.view(-1)[indices] = values
    return result


def checksum(delta: Delta) -> str:
    """SHA-256 over names, numbers of elements, indices and values, in the names' order."""
    digest = hashlib.sha256()
    for name in sorted(delta):
        changed = delta[name]
        digest.update(f"{name}\0{changed.values.dtype}\0{changed.indices.numel()}\0".encode())
        digest.update(_bytes(changed.indices))
        digest.update(_bytes(changed.values))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return array.data


def to_tensors(delta: Delta) -> dict[str, torch.Tensor]:
    """As it is written to a file or sent over a group."""
    tensors = {}
    for name, changed in delta.items():
        tensors[name + GAPS] = _encode(changed.indices.numpy())
        tensors[name + VALUES] = changed.values.contiguous()
    return tensors


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, SparseTensor]:
    """Raises:
    RequestError: these tensors are not those of a delta.
    """
    delta = {}
    for key, gaps in tensors.items():
        name, ending, rest = key.rpartition(GAPS)
        if not ending or rest:
            if not key.endswith(VALUES) or key.removesuffix(VALUES) + GAPS not in tensors:
                raise RequestError(
                    f"is not part of a delta: its tensors are <name>{GAPS} and <name>{VALUES}",
                    field=key,
                )
            continue
        values = tensors.get(name + VALUES)
        if values is None:
            raise RequestError(f"comes without {name}{VALUES}", field=key)
        delta[name] = SparseTensor(_decode(key, gaps), values)
    return delta


def to_bytes(delta: Delta) -> bytes:
    """A safetensors file."""
    content: bytes = save(to_tensors(delta))
    return content


def from_bytes(content: bytes) -> dict[str, SparseTensor]:
    """Raises:
    RequestError: it is truncated, damaged or something else.
    """
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise RequestError(
            f"{len(content)} bytes are no safetensors file: {error}", field="delta"
        ) from error
    return from_tensors(tensors)


def _encode(indices: npt.NDArray[np.int64]) -> torch.Tensor:
    gaps = np.diff(indices, prepend=-1) - 1
    smallest: tuple[int, type[np.unsignedinteger[Any]]] | None = None
    for kind in _GAP_TYPES.values():
        limit = int(np.iinfo(kind).max)
        num_bytes = int((gaps // limit + 1).sum()) * np.dtype(kind).itemsize
        if smallest is None or num_bytes < smallest[0]:
            smallest = (num_bytes, kind)
    assert smallest is not None
    kind = smallest[1]
    limit = int(np.iinfo(kind).max)
    repeats = gaps // limit + 1
    units = np.full(int(repeats.sum()), limit, dtype=kind)
    units[np.cumsum(repeats) - 1] = gaps % limit
    return torch.from_numpy(units)


def _decode(key: str, gaps: torch.Tensor) -> torch.Tensor:
    """Raises: RequestError."""
    kind = _GAP_TYPES.get(gaps.dtype)
    if kind is None or gaps.dim() != 1:
        raise RequestError(
            f"is {gaps.dtype} with {gaps.dim()} dimensions; gaps are a flat tensor of uint8, "
            "uint16 or uint32",
            field=key,
        )
    units = gaps.numpy().astype(np.uint64)
    last = units < np.iinfo(kind).max
    if units.size and not last[-1]:
        raise RequestError("ends in the middle of a gap: it is truncated", field=key)
    # A sum of less than 2^31 units of less than 2^32 each fits 63 bits.
    unchanged = np.cumsum(units)[last].astype(np.int64)
    return torch.from_numpy(unchanged + np.arange(unchanged.size))
