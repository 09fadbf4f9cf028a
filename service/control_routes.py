"""The native dialect's routes for pauses, sleep and weights."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from actors.control_api import DiskWeights, PauseMode, PauseStatus, WeightStatus, WeightUpdate
from service.body import openapi_body, read_body
from service.control import Control
from service.control_schemas import PauseAnswer, PauseBody, SleepBody, WakeBody, WeightsBody
from service.errors import error_answers
from service.intake import Intake

CONTROL_BODIES = (PauseBody, SleepBody, WakeBody, WeightsBody)


def control_routes(intake: Intake) -> APIRouter:
    router = APIRouter()
    control = Control(intake)
    max_bytes = intake.settings.max_request_bytes
    answers: dict[int | str, dict[str, Any]] = {
        200: {"model": PauseAnswer},
        **error_answers(400, 413, 503),
    }

    @router.get("/v1/pause", responses=answers)
    async def pause_status() -> Response:
        """Whether the group serves, stands still or sleeps."""
        return _answer(await intake.coordinator.pause_status())

    @router.post(
        "/v1/pause", openapi_extra=openapi_body(PauseBody, required=False), responses=answers
    )
    async def pause(request: Request) -> Response:
        """Stand still: no sample begins and the group does not change. Answers when that is so.

        Samples that are accepted meanwhile wait. Can be repeated, and one mode may follow another.
        """
        body = await read_body(request, PauseBody, max_bytes, may_be_empty=True)
        return _answer(await control.pause(request, PauseMode(body.mode)))

    @router.post("/v1/resume", responses=answers)
    async def resume() -> Response:
        """Go on after a pause. A group that is asleep has to be woken instead."""
        return _answer(await intake.coordinator.resume())

    @router.post(
        "/v1/sleep", openapi_extra=openapi_body(SleepBody, required=False), responses=answers
    )
    async def sleep(request: Request) -> Response:
        """Pause, end every worker and give every lease back. Answers when that is so."""
        body = await read_body(request, SleepBody, max_bytes, may_be_empty=True)
        return _answer(await control.sleep(request, PauseMode(body.mode)))

    @router.post(
        "/v1/wake", openapi_extra=openapi_body(WakeBody, required=False), responses=answers
    )
    async def wake(request: Request) -> Response:
        """Lease and found the group again. Answers when it serves, or with the reason why it
        cannot; then it is asleep as before."""
        body = await read_body(request, WakeBody, max_bytes, may_be_empty=True)
        return _answer(await control.wake(request, stay_paused=body.paused))

    @router.get("/v1/weights", responses=error_answers(503))
    async def weights() -> WeightStatus:
        """The version that new tokens are decoded with, and what became of the last update."""
        return await intake.coordinator.weight_status()

    @router.put(
        "/v1/weights",
        openapi_extra=openapi_body(WeightsBody),
        responses=error_answers(400, 413, 500, 503),
    )
    async def put_weights(request: Request) -> WeightStatus:
        """Load new weights into whoever is in the group and whoever will be. Answers when new
        tokens are decoded with them; unfinished samples go on from where they are. After an error
        the version before serves, and a repetition may succeed."""
        body = await read_body(request, WeightsBody, max_bytes)
        update = WeightUpdate(
            DiskWeights(body.path), body.version, body.base_version, body.checksum
        )
        return await intake.coordinator.update_weights(update)

    return router


def _answer(status: PauseStatus) -> Response:
    return JSONResponse(
        {
            "state": status.state,
            "mode": status.mode,
            "waiting_for": status.waiting_for,
            "error": status.error,
        }
    )
