"""What the service says about itself to clients of any dialect: one answer with the names of all.

The group is elastic, so its width is that of the moment.
"""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from service.dialect import dialect_route
from service.errors import describe
from service.intake import Intake


def server_info_routes(intake: Intake) -> APIRouter:
    router = APIRouter(tags=["Server"], route_class=dialect_route(describe))

    async def server_info() -> dict[str, Any]:
        model = await intake.coordinator.served_model()
        workers = [w for w in await intake.coordinator.workers() if w.rank is not None]
        health = await intake.coordinator.health()
        return {
            "model_path": model.path,
            "served_model_name": model.path,
            "weight_version": model.weight_version,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": len(workers),
            "ep_size": len(workers),
            "max_dp_size": health.wanted_workers,
            "context_length": model.max_model_len,
            "max_total_num_tokens": sum(worker.kv_capacity_tokens for worker in workers),
            "vllm_config": {
                "model_config": {
                    "model": model.path,
                    "max_model_len": model.max_model_len,
                    "vocab_size": model.vocab_size,
                },
                "parallel_config": {
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "data_parallel_size": len(workers),
                    "enable_expert_parallel": True,
                },
                # Its clients ask whether vLLM's own NCCL transfer is there; it is not.
                "weight_transfer_config": None,
            },
        }

    @router.get("/server_info")
    async def vllm_and_sglang_info() -> Response:
        """The model and the group as it is now, under SGLang's names, and under vLLM's in
        ``vllm_config``."""
        return JSONResponse(await server_info())

    @router.get("/get_server_info")
    async def sglang_info() -> Response:
        """SGLang's earlier name of ``/server_info``."""
        return JSONResponse(await server_info())

    return router
