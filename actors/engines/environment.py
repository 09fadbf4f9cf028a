"""What a worker fixes of vLLM before vLLM is imported: its environment and its options.

Imports nothing of vLLM.
"""

import os
from typing import Any

CPU_ENVIRONMENT = {
    # One thread per worker: workers that share cores only disturb each other with more.
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the worker's own process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose state `vllm_private` knows
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

FIXED_ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,  # no captured graphs: a change of membership swaps tensors
    "enable_expert_parallel": True,
    "distributed_executor_backend": "uni",
    "async_scheduling": False,
    "enable_prefix_caching": False,  # cached blocks could not move when the pool is resized
    "all2all_backend": "allgather_reducescatter",  # any expert map, uneven ones included
    "kv_transfer_config": {  # takes KV that another worker computed; see kv_copy
        "kv_connector": "SampleKvConnector",
        "kv_connector_module_path": "actors.engines.kv_copy",
        "kv_role": "kv_consumer",  # what others want is read between steps, not sent by them
    },
    "logprobs_mode": "processed_logprobs",
    "skip_tokenizer_init": True,
    "seed": 0,
}
"""Options of vLLM's ``EngineArgs`` that the elastic group depends on."""


def set_environment(rank: int, size: int, store_address: tuple[str, int]) -> None:
    """Defaults for what the user has not set, and the data-parallel place of this worker."""
    for name, value in {**CPU_ENVIRONMENT, **ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    os.environ.update(
        VLLM_DP_SIZE=str(size),
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL="0",
        VLLM_DP_MASTER_IP=store_address[0],
        VLLM_DP_MASTER_PORT=str(store_address[1]),
    )
