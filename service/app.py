"""The HTTP service: routes only parse, call the coordinator and render.

``create_app`` knows nothing of Ray: the coordinator is a port, so tests run it with a fake.
"""

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from actors.rollout_api import (
    CoordinatorPort,
    Health,
    OperationStatus,
    WorkerStatus,
)
from placement.errors import UnknownIdError
from placement.ids import RolloutId
from service.auth import TokenAuth, read_tokens
from service.body import openapi_body, openapi_components, read_body
from service.checks import Tokenizer
from service.delivery import FollowedStream, answer_whole
from service.errors import install_error_handlers
from service.intake import Intake
from service.native import to_request
from service.openai import openai_routes
from service.openai_schemas import ChatBody, CompletionBody
from service.schemas import RolloutAnswer, RolloutBody
from service.server_info import server_info_routes
from service.settings import ServiceSettings
from service.sglang import sglang_routes
from service.sglang_schemas import AbortBody, GenerateBody
from service.stream import NDJSON, answer_json, answer_lines, answer_when_done
from service.vllm import vllm_routes
from service.vllm_schemas import AbortRequestsBody, TokensBody

TITLE = "FlexFloor"
MAX_POLL_S = 60.0
BODIES: tuple[type[BaseModel], ...] = (
    RolloutBody,
    CompletionBody,
    ChatBody,
    GenerateBody,
    AbortBody,
    TokensBody,
    AbortRequestsBody,
)
"""What routes read themselves, so that FastAPI cannot know of it."""


def create_app(
    coordinator: CoordinatorPort,
    settings: ServiceSettings,
    tokenizer: Tokenizer | None,
) -> FastAPI:
    """The ASGI application. Without a tokenizer, prompts must be token ids.

    Raises: ConfigError, if there is no token in the file of tokens.
    """
    app = FastAPI(title=TITLE, description="Elastic rollouts for RL post-training")
    install_error_handlers(app)
    _install_openapi(app)
    intake = Intake(coordinator, settings, tokenizer)
    _add_rollout_routes(app, intake)
    _add_cluster_routes(app, coordinator)
    for routes in (openai_routes, sglang_routes, vllm_routes, server_info_routes):
        app.include_router(routes(intake))
    if settings.token_file is not None:
        app.add_middleware(TokenAuth, tokens=read_tokens(settings.token_file))
    return app


def _install_openapi(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            for body in BODIES:
                for name, component in openapi_components(body).items():
                    known = schema["components"]["schemas"].setdefault(name, component)
                    assert known == component, f"two schemas have the name {name}"
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _add_rollout_routes(app: FastAPI, intake: Intake) -> None:
    coordinator, settings, tokenizer = intake.coordinator, intake.settings, intake.tokenizer

    @app.post(
        "/v1/rollouts",
        openapi_extra=openapi_body(RolloutBody),
        responses={200: {"model": RolloutAnswer, "content": {NDJSON: {}}}},
    )
    async def create_rollout(request: Request) -> Response:
        """Decode a batch of prompts.

        With ``stream`` the answer is NDJSON: a line of ``type`` "rollout" (id and seed), a
        "sample" per ended sample, and a "summary" (or an "error"). Without it the answer
        comes when all samples have ended.
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
        )
        if body.stream:
            return FollowedStream(following, answer_lines(following, tokenizer), NDJSON)
        answer = answer_when_done(following, tokenizer)
        return await answer_whole(following, request.receive, answer)

    @app.get("/v1/rollouts/{rollout_id}", responses={200: {"model": RolloutAnswer}})
    async def get_rollout(
        rollout_id: str,
        samples: bool = False,
        cursor: Annotated[int, Query(ge=0)] = 0,
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

    @app.delete("/v1/rollouts/{rollout_id}", responses={200: {"model": RolloutAnswer}})
    async def abort_rollout(rollout_id: str) -> Response:
        """End the rollout; unfinished samples come back with what they have."""
        key = RolloutId(rollout_id)
        batch = await coordinator.abort(key)
        status = await coordinator.status(key)
        return answer_json(status, batch.samples, tokenizer, cursor=batch.cursor, done=batch.done)


def _add_cluster_routes(app: FastAPI, coordinator: CoordinatorPort) -> None:
    @app.get("/v1/workers")
    async def workers() -> list[WorkerStatus]:
        """The members of the group and those on their way in or out."""
        return await coordinator.workers()

    @app.get("/v1/operations")
    async def operations() -> list[OperationStatus]:
        """Changes of the group, oldest first; the last one may be in progress."""
        return await coordinator.operations()

    @app.get("/v1/operations/{generation}")
    async def operation(generation: int) -> OperationStatus:
        """One change of the group."""
        for candidate in await coordinator.operations():
            if candidate.generation == generation:
                return candidate
        raise UnknownIdError(f"no operation made generation {generation}", field="generation")

    @app.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """200 while there is forward progress (or nothing to do), else 503."""
        now = await coordinator.health()
        response.status_code = 200 if now.healthy else 503
        return now

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus exposition."""
        return Response(await coordinator.metrics_text(), media_type=CONTENT_TYPE_LATEST)
