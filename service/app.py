"""The HTTP service: routes only parse, call the coordinator and render.

``create_app`` knows nothing of Ray: the coordinator is a port, so tests run it with a fake.
"""

from typing import Any

from fastapi import FastAPI, Request
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
from service.auth import TokenAuth, read_tokens
from service.body import openapi_components
from service.checks import Tokenizer
from service.control_routes import CONTROL_BODIES, control_routes
from service.delivery import CLIENT_CLOSED_REQUEST
from service.errors import ErrorAnswer, error_answers, install_error_handlers
from service.intake import Intake
from service.metrics import RequestMeter, ServiceMetrics
from service.openai import openai_routes
from service.openai_answers import OpenAIErrorAnswer
from service.openai_schemas import ChatBody, CompletionBody
from service.rollout_routes import rollout_routes
from service.schemas import RolloutBody
from service.server_info import server_info_routes
from service.settings import ServiceSettings
from service.sglang import sglang_routes
from service.sglang_answers import SglangFailure
from service.sglang_control import SGLANG_CONTROL_BODIES, sglang_control_routes
from service.sglang_schemas import AbortBody, GenerateBody
from service.trl import TRL_BODIES, trl_routes
from service.vllm import vllm_routes
from service.vllm_control import VLLM_CONTROL_BODIES, vllm_control_routes
from service.vllm_schemas import AbortRequestsBody, TokensBody
from service.vllm_tokenize import DetokenizeBody, TokenizeBody, vllm_tokenize_routes
from service.watch import ClientGoneError

TITLE = "FlexFloor"
BODIES: tuple[type[BaseModel], ...] = (
    RolloutBody,
    CompletionBody,
    ChatBody,
    GenerateBody,
    AbortBody,
    TokensBody,
    AbortRequestsBody,
    TokenizeBody,
    DetokenizeBody,
    *CONTROL_BODIES,
    *SGLANG_CONTROL_BODIES,
    *VLLM_CONTROL_BODIES,
    *TRL_BODIES,
)
"""What routes read themselves, so that FastAPI cannot know of it."""
ERROR_SHAPES: tuple[type, ...] = (ErrorAnswer, OpenAIErrorAnswer, SglangFailure)
"""What routes refer to as their answers to what is wrong."""


def create_app(
    coordinator: CoordinatorPort,
    settings: ServiceSettings,
    tokenizer: Tokenizer | None,
) -> FastAPI:
    """The ASGI application. Without a tokenizer, prompts must be token ids.

    Raises: ConfigError, if there is no token in the file of tokens.
    """
    # Some dialects differ in nothing but the slash at the end of a path: no redirects.
    app = FastAPI(
        title=TITLE, description="Elastic rollouts for RL post-training", redirect_slashes=False
    )
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    _install_openapi(app)
    intake = Intake(coordinator, settings, tokenizer)
    app.include_router(rollout_routes(intake))
    metrics = ServiceMetrics()
    _add_cluster_routes(app, coordinator, metrics)
    for routes in (
        control_routes,
        openai_routes,
        sglang_routes,
        sglang_control_routes,
        vllm_routes,
        vllm_control_routes,
        vllm_tokenize_routes,
        trl_routes,
        server_info_routes,
    ):
        app.include_router(routes(intake))
    if settings.token_file is not None:
        app.add_middleware(TokenAuth, tokens=read_tokens(settings.token_file))
    app.add_middleware(RequestMeter, metrics=metrics)  # last is outermost: it sees refusals, too
    return app


async def _answer_nobody(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientGoneError)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _install_openapi(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            for body in (*BODIES, *ERROR_SHAPES):
                for name, component in openapi_components(body).items():
                    known = schema["components"]["schemas"].setdefault(name, component)
                    assert known == component, f"two schemas have the name {name}"
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _add_cluster_routes(
    app: FastAPI, coordinator: CoordinatorPort, metrics: ServiceMetrics
) -> None:
    @app.get("/v1/workers")
    async def workers() -> list[WorkerStatus]:
        """The members of the group and those on their way in or out."""
        return await coordinator.workers()

    @app.get("/v1/operations")
    async def operations() -> list[OperationStatus]:
        """Changes of the group, oldest first; the last one may be in progress."""
        return await coordinator.operations()

    @app.get("/v1/operations/{generation}", responses=error_answers(400, 404, 503))
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
    async def exposition() -> Response:
        """Prometheus exposition: the coordinator's metrics, and those of this service."""
        text = await coordinator.metrics_text() + metrics.text()
        return Response(text, media_type=CONTENT_TYPE_LATEST)
