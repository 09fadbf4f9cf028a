"""The tensors of a checkpoint as they travel: in chunks of bounded size, one buffer each.

A chunk is one array of bytes, so that whoever passes it on need not copy it. It never splits an
expert: a worker whose kernels want another layout than the checkpoint's can convert every expert
of a chunk. Names, types and shapes are the checkpoint's own.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

CHUNK_BYTES = 64 << 20
"""About the size of a chunk: bounds what a worker holds beside its weights while it loads."""

_ALIGNMENT_BYTES = 16  # a tensor must begin at a multiple of its element's size

_EXPERT = re.compile(r"^.*\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """``dtype``: torch's name ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """``buffer``: uint8, the tensors one after the other, each aligned."""

    specs: tuple[TensorSpec, ...]
    buffer: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of a copy: what another process has handed over may be read-only."""
        buffer = torch.from_numpy(self.buffer.copy())
        offset = 0
        for spec in self.specs:
            piece = buffer[offset : offset + spec.num_bytes]
            yield spec.name, piece.view(spec.torch_dtype).view(spec.shape)
            offset += _aligned(spec.num_bytes)

    def digest(self) -> bytes:
        return hashlib.blake2b(self.buffer.data, digest_size=16).digest()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def make_chunk(specs: tuple[TensorSpec, ...], tensors: Mapping[str, torch.Tensor]) -> WeightChunk:
    """``tensors`` on the CPU, one for each of ``specs``, as these say."""
    buffer = torch.zeros(sum(_aligned(spec.num_bytes) for spec in specs), dtype=torch.uint8)
    offset = 0
    for spec in specs:
        tensor = tensors[spec.name]
        assert tensor.dtype == spec.torch_dtype
        assert tuple(tensor.shape) == spec.shape
        piece = tensor.contiguous().view(-1).view(torch.uint8)
        buffer[offset : offset + spec.num_bytes] = piece
        offset += _aligned(spec.num_bytes)
    return WeightChunk(specs, buffer.numpy())


def plan_chunks(
    specs: Iterable[TensorSpec], chunk_bytes: int = CHUNK_BYTES
) -> tuple[tuple[TensorSpec, ...], ...]:
    """All of ``specs``, in chunks of up to ``chunk_bytes`` unless a single expert is larger."""
    units: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        expert = _EXPERT.match(spec.name)
        units.setdefault(expert.group() if expert else spec.name, []).append(spec)
    chunks: list[list[TensorSpec]] = [[]]
    size = 0
    for unit in units.values():
        unit_bytes = sum(spec.num_bytes for spec in unit)
        if chunks[-1] and size + unit_bytes > chunk_bytes:
            chunks.append([])
            size = 0
        chunks[-1] += unit
        size += unit_bytes
    return tuple(tuple(chunk) for chunk in chunks)
