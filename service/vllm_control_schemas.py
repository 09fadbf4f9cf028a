"""The vLLM dialect: what control routes take (vLLM 0.32, and prime-rl on top of it)."""

from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from service.control_schemas import VERSION_PATTERN
from service.dialect import ANYTHING, DialectBody


class NoBody(DialectBody):
    """Everything is in the query, or there is nothing to say."""


class TransferInit(DialectBody):
    """A group between the trainer, rank 0, and the service, which is one more rank."""

    inside: ClassVar[str] = "init_info."
    neutral: ClassVar[dict[str, Any]] = {
        "packed_buffer_size_bytes": ANYTHING,  # of packed broadcasts alone
        "packed_num_buffers": ANYTHING,
    }

    master_address: str | None = None
    master_port: int | None = Field(default=None, ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    """The service's rank."""
    world_size: int = Field(ge=2)
    backend: str | None = None
    """Of ``torch.distributed``: gloo or nccl. vLLM's own rendezvous, which needs none, is not
    served."""
    packed: bool = False
    """Not served: each tensor is broadcast by itself."""
    nccl_unique_id_b64: str | None = None
    """Not served."""


class TransferInitBody(DialectBody):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "init_info": {
                        "master_address": "10.0.0.7",
                        "master_port": 51216,
                        "rank_offset": 1,
                        "world_size": 2,
                        "backend": "gloo",
                    }
                }
            ]
        }
    )

    init_info: TransferInit


class TransferUpdate(DialectBody):
    """Tensors that the trainer broadcasts while this request is answered."""

    inside: ClassVar[str] = "update_info."
    neutral: ClassVar[dict[str, Any]] = {"is_checkpoint_format": (True,), "packed": (False,)}

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class UpdateWeightsBody(DialectBody):
    """Either tensors of the transfer group, loaded by ``/finish_weight_update``, or a directory,
    loaded at once."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"weight_dir": "/shared/step-7"}]})

    update_info: TransferUpdate | None = None
    weight_dir: str | None = None
    """A directory of safetensors files that the coordinator's node can read (prime-rl)."""
    weight_version: str | None = Field(default=None, pattern=VERSION_PATTERN)
    """Of a directory; without it, the number after the version that serves."""


class FinishUpdateBody(DialectBody):
    weight_version: str | None = Field(default=None, pattern=VERSION_PATTERN)
    """Without it, the number after the version that serves."""
