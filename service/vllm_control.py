"""The vLLM dialect's control routes: pause, sleep and weights on a group whose width changes.

What differs from vLLM's own server: asleep, every worker has ended and its slot is free for
others; the service is one rank of a trainer's group for weights, whatever its width.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from actors.control_api import (
    STANDS_STILL,
    DiskWeights,
    GroupWeights,
    PauseMode,
    ServingState,
    WeightsGroup,
)
from placement.errors import RequestError, UnknownIdError
from service.body import openapi_body, read_body
from service.control import Control
from service.dialect import dialect_route
from service.errors import NotServedError, error_answers
from service.intake import Intake
from service.openai_answers import OpenAIErrorAnswer, openai_error
from service.vllm_control_schemas import (
    FinishUpdateBody,
    NoBody,
    TransferInit,
    TransferInitBody,
    UpdateWeightsBody,
)

GROUP = "vllm"
"""vLLM's server has one transfer group, without a name."""


VLLM_CONTROL_BODIES = (TransferInitBody, UpdateWeightsBody, FinishUpdateBody)


def vllm_control_routes(intake: Intake) -> APIRouter:
    router = APIRouter(
        tags=["vLLM control"],
        route_class=dialect_route(openai_error),
        responses=error_answers(400, 413, 503, shape=OpenAIErrorAnswer),
    )
    _add_pause_routes(router, intake)
    _add_sleep_routes(router, intake)
    _add_weight_routes(router, intake)
    return router


def _add_pause_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes

    @router.post("/pause")
    async def pause(request: Request, mode: PauseMode = PauseMode.ABORT) -> Response:
        """Answers when nothing is decoded any more. Requests that come meanwhile wait.

        ``abort`` answers all clients with what there is, ``wait`` finishes what has begun, ``keep``
        lets it stand still. ``clear_cache`` may be sent: no KV outlives its request anyhow.
        """
        await read_body(request, NoBody, max_bytes, may_be_empty=True)
        await control.pause(request, mode)
        return JSONResponse({"status": "paused"})

    @router.post("/resume")
    async def resume() -> Response:
        """Go on after a pause. A group that is asleep has to be woken instead."""
        await intake.coordinator.resume()
        return JSONResponse({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        """Also while asleep."""
        status = await intake.coordinator.pause_status()
        return JSONResponse({"is_paused": status.state in STANDS_STILL})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        """``success``: no request will read KV that was computed before now. No KV outlives its
        request, so only running ones have any; ``reset_running_requests`` makes them compute
        theirs anew."""
        success = await intake.coordinator.reset_prefix_cache(running=reset_running_requests)
        return JSONResponse({"success": success})

    @router.get("/liveness")
    async def liveness() -> Response:
        """As ``/health``: 200 while there is forward progress, or nothing to do."""
        health = await intake.coordinator.health()
        content = {"status": "alive" if health.healthy else "stuck", "detail": health.detail}
        return JSONResponse(content, status_code=200 if health.healthy else 503)


def _add_sleep_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes

    @router.post("/sleep")
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: PauseMode = PauseMode.ABORT,
    ) -> Response:
        """Give every slot back; the weights stay where a group is founded from. Level 0 only
        pauses; 1 and 2 are the same here."""
        await read_body(request, NoBody, max_bytes, may_be_empty=True)
        await (control.sleep if level else control.pause)(request, mode)
        return JSONResponse({"status": "sleeping", "level": level})

    @router.post("/wake_up")
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query()] = None
    ) -> Response:
        """Found the group again, and serve. With ``tags=weights`` alone it stands still after
        that, for new weights, until ``kv_cache`` is woken, too, or ``/resume``."""
        await read_body(request, NoBody, max_bytes, may_be_empty=True)
        check_tags(tags)
        status = await control.wake(request, stay_paused=leaves_kv(tags))
        awake = status.state is ServingState.SERVING
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """As vLLM's: a group that only stands still sleeps at level 0."""
        status = await intake.coordinator.pause_status()
        return JSONResponse({"is_sleeping": status.state in STANDS_STILL})


def check_tags(tags: list[str] | None) -> None:
    """Raises: RequestError."""
    for tag in tags or ():
        if tag not in ("weights", "kv_cache", "scheduling", "cuda_graph"):
            raise RequestError(
                f"has {tag!r}; a tag is weights, kv_cache, scheduling or cuda_graph", field="tags"
            )


def leaves_kv(tags: Sequence[str] | None) -> bool:
    """Whether something is woken, but not what decoding needs."""
    return bool(tags) and not {"kv_cache", "scheduling"}.intersection(tags or ())


def _add_weight_routes(router: APIRouter, intake: Intake) -> None:
    control, max_bytes = Control(intake), intake.settings.max_request_bytes
    broken = error_answers(500, 501, shape=OpenAIErrorAnswer)

    @router.post(
        "/init_weight_transfer_engine",
        openapi_extra=openapi_body(TransferInitBody),
        responses=broken,
    )
    async def init_transfer(request: Request) -> Response:
        """Join the trainer's ``torch.distributed`` group; answers when all its ranks have met. A
        group of before is left."""
        body = await read_body(request, TransferInitBody, max_bytes)
        group = _weights_group(body.init_info)
        with suppress(UnknownIdError):  # there was none
            await intake.coordinator.destroy_weights_group(GROUP)
        await intake.coordinator.init_weights_group(group)
        return JSONResponse({"message": "the service has joined the group"})

    @router.post(
        "/shutdown_weight_transfer_engine", responses=error_answers(404, shape=OpenAIErrorAnswer)
    )
    async def shutdown_transfer() -> Response:
        """Leave the group."""
        await intake.coordinator.destroy_weights_group(GROUP)
        return JSONResponse({"message": "the service has left the group"})

    @router.post("/start_weight_update")
    async def start_update(request: Request) -> Response:
        """Tensors follow. Those of an update that was not finished are dropped."""
        await read_body(request, NoBody, max_bytes, may_be_empty=True)
        await control.begin_update()
        return JSONResponse({"message": "send tensors, then finish the update"})

    @router.post("/update_weights", openapi_extra=openapi_body(UpdateWeightsBody), responses=broken)
    async def update_weights(request: Request) -> Response:
        """Receive tensors of the group, or load a directory. Unfinished requests go on with the
        new weights from where they are; after an error those of before serve."""
        body = await read_body(request, UpdateWeightsBody, max_bytes)
        if (body.update_info is None) == (body.weight_dir is None):
            raise RequestError("give either update_info or weight_dir", field="update_info")
        if body.weight_dir is not None:
            status = await control.update(DiskWeights(body.weight_dir), body.weight_version)
            return JSONResponse({"message": "loaded", "weight_version": status.version})
        assert body.update_info is not None
        info = body.update_info
        tensors = GroupWeights(
            GROUP,
            tuple(info.names),
            tuple(info.dtype_names),
            tuple(tuple(shape) for shape in info.shapes),
        )
        await control.add_part(tensors, None)
        return JSONResponse({"message": "received; finish the update to load them"})

    @router.post(
        "/finish_weight_update",
        openapi_extra=openapi_body(FinishUpdateBody, required=False),
        responses=broken,
    )
    async def finish_update(request: Request) -> Response:
        """Load what has been received since the update was started. Answers when new tokens are
        decoded with it; after an error the weights of before serve."""
        body = await read_body(request, FinishUpdateBody, max_bytes, may_be_empty=True)
        status = await control.finish_update(body.weight_version)
        if status is None:
            raise RequestError("no update was started; start one and send its tensors first")
        return JSONResponse({"message": "loaded", "weight_version": status.version})


def _weights_group(info: TransferInit) -> WeightsGroup:
    """Raises: RequestError, NotServedError."""
    if info.nccl_unique_id_b64 is not None or info.packed or info.backend is None:
        raise NotServedError(
            "vLLM's own rendezvous and packed broadcasts are not served; name a torch.distributed "
            "backend (gloo or nccl), join its group and send tensor by tensor, or write the "
            "weights to a directory and send its path as weight_dir to /update_weights",
            field="init_info.backend",
        )
    if info.master_address is None or info.master_port is None:
        field = "master_port" if info.master_address is not None else "master_address"
        raise RequestError("is missing", field=f"init_info.{field}")
    return WeightsGroup(
        GROUP,
        info.master_address,
        info.master_port,
        info.rank_offset,
        info.world_size,
        info.backend,
    )
