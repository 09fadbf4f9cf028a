"""What lies in a directory of safetensors files: names, types, shapes, and the tensors themselves.

Files are mapped, not read: a tensor is read when it is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from actors.weight_chunks import TensorSpec
from placement.errors import RequestError

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Attributes:
    specs: of all tensors, in the order of files and of tensors in a file.
    """

    specs: Mapping[str, TensorSpec]
    _file_of: Mapping[str, Path]
    _field: str

    def read(self, name: str) -> torch.Tensor:
        """Raises: RequestError: the file has gone or is damaged."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise RequestError(
                f"cannot read {name} of {path}: {error}", field=self._field
            ) from error
        return tensor


def open_checkpoint(location: str, field: str) -> CheckpointFiles:
    """All safetensors files of a directory, or a single one.

    Args:
        field: what an error names.

    Raises:
        RequestError: there are none, or one cannot be read.
    """
    path = Path(location)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise RequestError(
                f"directory {location} holds no *.safetensors file; give one that does and that "
                "the coordinator's node can read",
                field=field,
            )
    elif path.is_file():
        files = [path]
    else:
        raise RequestError(
            f"there is no {location} on the coordinator's node; give a directory of safetensors "
            "files that it can read",
            field=field,
        )
    specs: dict[str, TensorSpec] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        for spec in _specs_of(file, field):
            if spec.name in specs:
                raise RequestError(
                    f"{spec.name} is in {file_of[spec.name].name} and in {file.name}", field=field
                )
            specs[spec.name], file_of[spec.name] = spec, file
    return CheckpointFiles(specs, file_of, field)


def _specs_of(path: Path, field: str) -> list[TensorSpec]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
            return [
                TensorSpec(name, _TORCH_NAMES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            ]
    except (SafetensorError, OSError, KeyError) as error:
        raise RequestError(
            f"{path} is no safetensors file that can be read: {error}", field=field
        ) from error
