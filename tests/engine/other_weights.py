"""Other weights for the tiny model, and what fresh engines decode with them."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from actors.weight_chunks import TensorSpec, WeightChunk, make_chunk, plan_chunks


def read(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "model.safetensors")


def perturbed(
    tensors: dict[str, torch.Tensor], seed: int, share: float = 1.0
) -> dict[str, torch.Tensor]:
    """Every tensor with about ``share`` of its elements changed by a twentieth."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator) * 0.05 * tensor.float().std()
        noise = noise if tensor.dim() > 1 else noise + 0.05
        noise *= torch.rand(tensor.shape, generator=generator) < share
        changed[name] = (tensor.float() + noise).to(tensor.dtype)
    return changed


def write_model(source: str | Path, directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    """The model in ``source`` with other weights."""
    shutil.copytree(source, directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def chunks_of(tensors: dict[str, torch.Tensor], chunk_bytes: int = 1 << 20) -> list[WeightChunk]:
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    ]
    return [make_chunk(chunk, tensors) for chunk in plan_chunks(specs, chunk_bytes)]
