"""The SGLang dialect's control routes: pause, memory and weights on a group whose width changes.

What differs from SGLang's own server: memory is released by ending every worker, so that its slot
is free for others; the service is one rank of a trainer's group for weights, whatever its width;
buckets of weights that come while generation is paused are loaded together when it continues.
"""

import base64
import binascii

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from actors.control_api import (
    DiskWeights,
    GroupWeights,
    ObjectWeights,
    PauseMode,
    ServingState,
    WeightsGroup,
    WeightStatus,
)
from placement.errors import RequestError
from service.body import openapi_body, read_body
from service.control import Control
from service.dialect import dialect_route
from service.errors import NotServedError, error_answers
from service.intake import Intake
from service.sglang_answers import SglangFailure, sglang_failure
from service.sglang_control_schemas import (
    ContinueGenerationBody,
    DestroyGroupBody,
    FromDiskBody,
    FromDistributedBody,
    FromTensorBody,
    InitGroupBody,
    MemoryBody,
    PauseGenerationBody,
    WeightBody,
)

SGLANG_CONTROL_BODIES = (
    PauseGenerationBody,
    ContinueGenerationBody,
    MemoryBody,
    FromDiskBody,
    FromTensorBody,
    FromDistributedBody,
    InitGroupBody,
    DestroyGroupBody,
)


def sglang_control_routes(intake: Intake) -> APIRouter:
    router = APIRouter(
        tags=["SGLang control"],
        route_class=dialect_route(sglang_failure),
        responses=error_answers(400, 413, 503, shape=SglangFailure),
    )
    _add_pause_routes(router, intake)
    _add_memory_routes(router, intake)
    _add_weight_routes(router, intake)
    _add_group_routes(router, intake)
    return router


def _done(message: str) -> Response:
    return JSONResponse({"success": True, "message": message})


def _add_pause_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes

    @router.post(
        "/pause_generation", openapi_extra=openapi_body(PauseGenerationBody, required=False)
    )
    async def pause_generation(request: Request) -> Response:
        """Answers when nothing is decoded any more. Requests that come meanwhile wait."""
        body = await read_body(request, PauseGenerationBody, max_bytes, may_be_empty=True)
        mode = PauseMode.ABORT if body.mode == "abort" else PauseMode.KEEP
        await control.pause(request, mode)
        if body.mode == "retract":
            await intake.coordinator.reset_prefix_cache(running=True)
        return JSONResponse({"status": "ok", "message": "generation is paused"})

    @router.post(
        "/continue_generation",
        openapi_extra=openapi_body(ContinueGenerationBody, required=False),
        responses=error_answers(500, shape=SglangFailure),
    )
    async def continue_generation(request: Request) -> Response:
        """Load the weights that came during the pause, if any, and go on. If they cannot be
        loaded, generation stays paused; asked again, it goes on with the weights of before."""
        await read_body(request, ContinueGenerationBody, max_bytes, may_be_empty=True)
        await control.finish_update(None)
        await intake.coordinator.resume()
        return JSONResponse({"status": "ok", "message": "generation goes on"})

    async def flush_cache() -> Response:
        if not await intake.coordinator.reset_prefix_cache():
            workers = await intake.coordinator.workers()
            running = sum(worker.running for worker in workers)
            raise RequestError(
                f"{running} samples run with KV of their own, which only their end frees; abort "
                "them, or pause generation with mode retract"
            )
        return _done("no KV of before is left")

    @router.get("/flush_cache")
    async def flush_cache_by_get() -> Response:
        """200 if no KV computed before now is left, which is so when nothing runs; else 400. No KV
        outlives its request."""
        return await flush_cache()

    @router.post("/flush_cache")
    async def flush_cache_by_post() -> Response:
        """As by GET."""
        return await flush_cache()


def _add_memory_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes

    @router.post(
        "/release_memory_occupation", openapi_extra=openapi_body(MemoryBody, required=False)
    )
    async def release_memory(request: Request) -> Response:
        """End every worker and give its slot back; unfinished requests wait with their tokens. A
        worker holds weights and KV, so both go, and ``tags`` must name the weights."""
        body = await read_body(request, MemoryBody, max_bytes, may_be_empty=True)
        if body.tags is not None and "weights" not in body.tags:
            raise RequestError(
                f"is {body.tags}; a worker's slot holds weights and KV, so only both can be "
                "released: name weights, too, or pause generation with mode retract",
                field="tags",
            )
        await control.sleep(request, PauseMode.KEEP)
        return _done("every slot has gone back")

    @router.post(
        "/resume_memory_occupation", openapi_extra=openapi_body(MemoryBody, required=False)
    )
    async def resume_memory(request: Request) -> Response:
        """Found the group again, and serve. With ``tags`` of weights alone it stands still after
        that, for new weights, until the KV is resumed, too."""
        body = await read_body(request, MemoryBody, max_bytes, may_be_empty=True)
        stay_paused = body.tags is not None and "kv_cache" not in body.tags
        await control.wake(request, stay_paused=stay_paused)
        return _done("the group is there")


def _add_weight_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes
    broken = error_answers(500, 501, shape=SglangFailure)

    async def load(body: WeightBody, source: ObjectWeights | GroupWeights) -> Response:
        """While paused, it may be a bucket of several."""
        if body.abort_all_requests:
            await intake.abort_all()
        if (await intake.coordinator.pause_status()).state is ServingState.PAUSED:
            await control.add_part(source, body.weight_version)
            return _done("received; loaded when generation continues")
        return _loaded(await control.update(source, body.weight_version))

    @router.post(
        "/update_weights_from_disk", openapi_extra=openapi_body(FromDiskBody), responses=broken
    )
    async def from_disk(request: Request) -> Response:
        """Load a directory. After an error the weights of before serve."""
        body = await read_body(request, FromDiskBody, max_bytes)
        if body.abort_all_requests:
            await intake.abort_all()
        return _loaded(await control.update(DiskWeights(body.model_path), body.weight_version))

    @router.post(
        "/update_weights_from_tensor", openapi_extra=openapi_body(FromTensorBody), responses=broken
    )
    async def from_tensor(request: Request) -> Response:
        """Load tensors that are sent as safetensors files in base64. While generation is paused,
        they are kept until it continues."""
        body = await read_body(request, FromTensorBody, max_bytes)
        return await load(body, ObjectWeights(_safetensors(body)))

    @router.post(
        "/update_weights_from_distributed",
        openapi_extra=openapi_body(FromDistributedBody),
        responses=broken,
    )
    async def from_distributed(request: Request) -> Response:
        """Receive tensors that the trainer broadcasts one after the other while this is answered.
        While generation is paused, they are kept until it continues."""
        body = await read_body(request, FromDistributedBody, max_bytes)
        tensors = GroupWeights(
            body.group_name,
            tuple(body.names),
            tuple(dtype.removeprefix("torch.") for dtype in body.dtypes),
            tuple(tuple(shape) for shape in body.shapes),
        )
        return await load(body, tensors)


def _loaded(status: WeightStatus) -> Response:
    return _done(f"version {status.version} serves")


def _safetensors(body: FromTensorBody) -> tuple[bytes, ...]:
    """Raises: RequestError, NotServedError."""
    if body.load_format != "safetensors":
        raise NotServedError(
            f"is {body.load_format!r}; pickled tensors run code of whoever sends them and are not "
            "read: send the base64 of safetensors files with load_format safetensors, or write "
            "them to a directory for /update_weights_from_disk",
            field="load_format",
        )
    files = []
    for number, text in enumerate(body.serialized_named_tensors):
        try:
            files.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise RequestError(
                f"is no base64: {error}", field=f"serialized_named_tensors[{number}]"
            ) from error
    return tuple(files)


def _add_group_routes(router: APIRouter, intake: Intake) -> None:
    max_bytes = intake.settings.max_request_bytes

    @router.post("/init_weights_update_group", openapi_extra=openapi_body(InitGroupBody))
    async def init_group(request: Request) -> Response:
        """Join the trainer's group; answers when all its ranks have met."""
        body = await read_body(request, InitGroupBody, max_bytes)
        await intake.coordinator.init_weights_group(
            WeightsGroup(
                body.group_name,
                body.master_address,
                body.master_port,
                body.rank_offset,
                body.world_size,
                body.backend,
            )
        )
        return _done("the service has joined the group")

    @router.post(
        "/destroy_weights_update_group",
        openapi_extra=openapi_body(DestroyGroupBody, required=False),
        responses=error_answers(404, shape=SglangFailure),
    )
    async def destroy_group(request: Request) -> Response:
        """Leave the trainer's group."""
        body = await read_body(request, DestroyGroupBody, max_bytes, may_be_empty=True)
        await intake.coordinator.destroy_weights_group(body.group_name)
        return _done("the service has left the group")
