"""vLLM, hosted in-process. Every touch of its private API is in ``vllm_private``."""
