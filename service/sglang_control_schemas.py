"""The SGLang dialect: what control routes take."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from service.control_schemas import VERSION_PATTERN
from service.dialect import ANYTHING, DialectBody
from service.schemas import Body

DEFAULT_GROUP = "weight_update_group"
TAGS = ("weights", "kv_cache", "cuda_graph")


class PauseGenerationBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"mode": "in_place"}]})

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """``abort`` answers all clients with what there is, ``in_place`` lets requests stand still with
    their KV, ``retract`` without it: it is computed anew when generation goes on."""


class ContinueGenerationBody(DialectBody):
    neutral: ClassVar[dict[str, Any]] = {"torch_empty_cache": ANYTHING}


class MemoryBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"tags": ["weights", "kv_cache"]}]})

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None
    """Without any, all."""


class WeightBody(DialectBody):
    """What all updates have in common."""

    neutral: ClassVar[dict[str, Any]] = {
        # KV of old weights is never read, whatever this says.
        "flush_cache": ANYTHING,
        "torch_empty_cache": ANYTHING,
        "token_step": ANYTHING,
        "recapture_cuda_graph": ANYTHING,
        "is_async": (False,),
        "keep_pause": (False,),
        "disable_draft_model": (None, False),
    }

    weight_version: str | None = Field(default=None, pattern=VERSION_PATTERN)
    """Names the weights; samples tell it. Without it, the number after the version that serves."""
    abort_all_requests: bool = False
    """End all requests first, with what they have. Otherwise they go on with the new weights."""


class FromDiskBody(WeightBody):
    model_config = ConfigDict(json_schema_extra={"examples": [{"model_path": "/shared/step-7"}]})

    model_path: str = Field(min_length=1)
    """A directory of safetensors files that the coordinator's node can read."""
    load_format: Literal["auto", "safetensors"] | None = None


class FromTensorBody(WeightBody):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"serialized_named_tensors": ["<base64>"], "load_format": "safetensors"},
            ]
        }
    )

    serialized_named_tensors: list[str] = Field(min_length=1)
    """Each the base64 of a safetensors file. SGLang's own form, a pickle, is refused: it runs
    code of whoever sends it."""
    load_format: str | None = None
    """``safetensors``."""


class FromDistributedBody(WeightBody):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "names": ["model.norm.weight"],
                    "dtypes": ["bfloat16"],
                    "shapes": [[64]],
                    "weight_version": "7",
                }
            ]
        }
    )

    names: list[str]
    dtypes: list[str]
    """torch's names, with or without ``torch.``."""
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP
    load_format: None = None


class InitGroupBody(DialectBody):
    """A ``torch.distributed`` group between the trainer, rank 0, and the service, one more rank."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "master_address": "10.0.0.7",
                    "master_port": 29500,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "gloo",
                }
            ]
        }
    )

    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    """The service's rank."""
    world_size: int = Field(ge=2)
    group_name: str = Field(default=DEFAULT_GROUP, min_length=1)
    backend: str = "nccl"


class DestroyGroupBody(DialectBody):
    group_name: str = Field(default=DEFAULT_GROUP, min_length=1)
