"""Can this model be served? Answered from its directory, before anything is started.

Only what has been proven is let through; everything else is refused by name, because a model
that starts and then decodes with wrong experts is worse than one that does not start.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engines.environment import FIXED_ENGINE_ARGS
from actors.settings import RuntimeSettings
from placement.errors import ConfigError, FlexFloorError, ModelRefusedError

PROVEN_ARCHITECTURES = ("Qwen3MoeForCausalLM",)

EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names under which models keep their number of routed experts per layer."""

SHARED_EXPERT_NAMES = (
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
)

OWN_SETTINGS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "group.max_samples_per_worker",
    "kv_cache_memory_bytes": "group.kv_memory_bytes",
}
"""Options of vLLM that have a setting of their own here."""

OWNED_OPTIONS = frozenset(
    {
        *FIXED_ENGINE_ARGS,
        "moe_backend",
        # The group: its size changes while vLLM runs.
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "expert_placement_strategy",
        "enable_eplb",
        "eplb_config",
        "enable_elastic_ep",
        "elastic_ep_max_dp_size",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "worker_cls",
        # Lockstep: every worker makes one forward per step.
        "enable_dbo",
        "scheduler_cls",
        # Memory: experts and KV share it by our plan.
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "kv_cache_dtype",
        # Weights: a joiner takes them from its peers.
        "load_format",
        "quantization",
        "quantization_config",
        "hf_overrides",
        "enable_lora",
    }
)

PARALLEL_OPTIONS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def check_model(settings: RuntimeSettings) -> None:
    """Read ``config.json`` of the model and refuse what cannot be served.

    Raises:
        ConfigError, ModelRefusedError: the first thing that is wrong.
    """
    model_config = read_model_config(Path(settings.model.path))
    for problem in find_problems(model_config, settings):
        raise problem


def read_model_config(directory: Path) -> dict[str, Any]:
    """Raises: ConfigError."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; give that of a Hugging Face checkpoint",
            field="model.path",
        )
    path = directory / "config.json"
    try:
        model_config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} has no config.json; give the directory of a Hugging Face checkpoint",
            field="model.path",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model.path") from error
    if not isinstance(model_config, dict):
        raise ConfigError(f"{path} holds no JSON object", field="model.path")
    return model_config


def find_problems(
    model_config: Mapping[str, Any], settings: RuntimeSettings
) -> list[FlexFloorError]:
    """All that is wrong with serving this model under these settings, gravest first."""
    return [
        *_architecture_problems(model_config),
        *_size_problems(model_config, settings),
        *_option_problems(settings.model.engine),
    ]


def _architecture_problems(model_config: Mapping[str, Any]) -> list[FlexFloorError]:
    def refused(message: str) -> FlexFloorError:
        return ModelRefusedError(message, field="model.path")

    problems: list[FlexFloorError] = []
    architectures = model_config.get("architectures") or []
    proven = ", ".join(PROVEN_ARCHITECTURES)
    if _num_experts(model_config) is None:
        problems.append(
            refused(
                f"{architectures} is not a mixture of experts (no {EXPERT_COUNT_NAMES[0]} in "
                f"config.json); serve one of {proven}"
            )
        )
    elif not any(name in PROVEN_ARCHITECTURES for name in architectures):
        problems.append(
            refused(f"the architecture {architectures} is not proven here; serve one of {proven}")
        )
    problems += [
        refused(
            f"the model has shared experts ({name} = {model_config[name]}), which do not move "
            "with the routed ones yet; serve a model without them"
        )
        for name in SHARED_EXPERT_NAMES
        if model_config.get(name)
    ]
    quantization = model_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        problems.append(
            refused(
                f"the checkpoint is quantised (quant_method {method}), and quantised experts "
                "cannot be moved yet; serve the bfloat16 checkpoint"
            )
        )
    return problems


def _size_problems(
    model_config: Mapping[str, Any], settings: RuntimeSettings
) -> list[FlexFloorError]:
    problems: list[FlexFloorError] = []
    num_experts = _num_experts(model_config)
    max_workers = settings.group.max_workers
    if num_experts is not None and num_experts < max_workers:
        problems.append(
            ConfigError(
                f"is {max_workers}, but the model has {num_experts} experts per layer and every "
                f"worker holds at least one; set it to {num_experts} or less",
                field="group.max_workers",
            )
        )
    positions = model_config.get("max_position_embeddings")
    if isinstance(positions, int) and settings.model.max_model_len > positions:
        problems.append(
            ConfigError(
                f"is {settings.model.max_model_len}, but the model has {positions} positions "
                f"(max_position_embeddings); set it to {positions} or less",
                field="model.max_model_len",
            )
        )
    return problems


def _option_problems(engine: Mapping[str, Any]) -> list[FlexFloorError]:
    problems: list[FlexFloorError] = []
    for name, value in engine.items():
        field = f"model.engine.{name}"
        if name in OWN_SETTINGS:
            problems.append(
                ConfigError(f"is {value!r}; set {OWN_SETTINGS[name]} instead", field=field)
            )
        elif name in OWNED_OPTIONS:
            problems.append(
                ConfigError(f"is {value!r}, but FlexFloor decides it; remove it", field=field)
            )
        elif name in PARALLEL_OPTIONS and value != 1:
            problems.append(
                ModelRefusedError(
                    f"is {value!r}; a worker is one expert-parallel rank on one accelerator, so "
                    "it must be 1 or left out",
                    field=field,
                )
            )
    return problems


def _num_experts(model_config: Mapping[str, Any]) -> int | None:
    counts = (model_config.get(name) for name in EXPERT_COUNT_NAMES)
    return next((count for count in counts if isinstance(count, int) and count > 1), None)
