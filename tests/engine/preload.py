"""Imported once by the fork server, so that each worker process starts in a fraction of a second.

Sets the environment that vLLM reads at import; starts no thread, group or engine.
"""

from actors.engines.environment import set_environment

set_environment(rank=0, size=1, store_address=("127.0.0.1", 0))

import vllm.model_executor.models.qwen3_moe  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import actors.engines.vllm_engine  # noqa: E402  (after the environment)
import actors.groups  # noqa: E402
import actors.migration  # noqa: E402, F401
