"""The native dialect's routes for rollouts: create, ask, follow, end."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from placement.ids import RolloutId
from service.body import openapi_body, read_body
from service.delivery import FollowedStream, answer_whole
from service.errors import error_answers
from service.intake import Intake
from service.native import to_request
from service.schemas import RolloutAnswer, RolloutBody, StreamOf
from service.stream import NDJSON, answer_json, answer_lines, answer_when_done

MAX_POLL_S = 60.0
_ANSWER: dict[int | str, dict[str, Any]] = {200: {"model": RolloutAnswer}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Lines of JSON", "content": {NDJSON: {}}}
}

Cursor = Annotated[int, Query(ge=0, lt=1 << 53)]


def rollout_routes(intake: Intake) -> APIRouter:
    coordinator, settings, tokenizer = intake.coordinator, intake.settings, intake.tokenizer
    router = APIRouter()

    @router.post(
        "/v1/rollouts",
        openapi_extra=openapi_body(RolloutBody),
        responses={
            200: {"model": RolloutAnswer, "content": {NDJSON: {}}},
            **error_answers(400, 413, 429, 503),
        },
    )
    async def create_rollout(request: Request) -> Response:
        """Decode a batch of prompts.

        With ``stream`` the answer is NDJSON: a line of ``type`` "rollout" (id and seed), a line
        per ended "sample" or, with "tokens", one with what is new of several, and a "summary"
        (or an "error"). Without it the answer comes when all samples have ended.
        """
        body = await read_body(request, RolloutBody, settings.max_request_bytes)
        model = await intake.served_model()
        # Tokenizing a large batch takes seconds; others are answered meanwhile.
        rollout = await asyncio.to_thread(to_request, body, model, settings, tokenizer)
        following = await intake.followed.submit(
            rollout,
            id_field="id",
            id_is_given=body.id is not None,
            abort_when_left=body.abort_on_disconnect,
            reconnect_s=body.reconnect_s,
        )
        if body.stream:
            lines = answer_lines(following, tokenizer, body.stream_of)
            return FollowedStream(following, lines, NDJSON)
        answer = answer_when_done(following, tokenizer)
        return await answer_whole(following, request.receive, answer)

    @router.get("/v1/rollouts/{rollout_id}", responses={**_ANSWER, **error_answers(400, 404, 503)})
    async def get_rollout(
        rollout_id: str,
        samples: bool = False,
        cursor: Cursor = 0,
        wait_s: Annotated[float, Query(ge=0, le=MAX_POLL_S)] = 0.0,
    ) -> Response:
        """State and usage; with ``samples``, ended samples after ``cursor`` (a page of them),
        waiting up to ``wait_s`` for the first."""
        key = RolloutId(rollout_id)
        status = await coordinator.status(key)
        if not samples:
            ended = status.ended_at is not None
            return answer_json(status, (), tokenizer, cursor=cursor, done=ended)
        batch = await coordinator.results(key, cursor, wait_s, settings.poll_limit)
        if batch.samples or batch.done:
            status = await coordinator.status(key)
        return answer_json(status, batch.samples, tokenizer, cursor=batch.cursor, done=batch.done)

    @router.get(
        "/v1/rollouts/{rollout_id}/stream",
        responses={**_STREAM, **error_answers(400, 404, 503)},
        response_class=Response,
    )
    async def follow_rollout(
        rollout_id: str,
        cursor: Cursor = 0,
        of: Literal["samples", "tokens"] = "samples",
    ) -> Response:
        """The lines of a rollout behind ``cursor``, as they come: for a client that lost its
        connection, or another one. Each line says from which cursor to read on behind it."""
        following = await intake.followed.join(RolloutId(rollout_id), cursor, StreamOf(of))
        return FollowedStream(following, answer_lines(following, tokenizer, StreamOf(of)), NDJSON)

    @router.delete("/v1/rollouts/{rollout_id}", responses={**_ANSWER, **error_answers(404, 503)})
    async def abort_rollout(rollout_id: str) -> Response:
        """End the rollout; unfinished samples come back with what they have."""
        key = RolloutId(rollout_id)
        batch = await coordinator.abort(key)
        status = await coordinator.status(key)
        return answer_json(status, batch.samples, tokenizer, cursor=batch.cursor, done=batch.done)

    return router
