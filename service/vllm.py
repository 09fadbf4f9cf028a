"""The vLLM dialect: routes, and from its requests to ours.

Routes about weights, pauses and sleep are ``service.vllm_control``'s.
"""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from actors.rollout_api import ServedModel
from placement.errors import RequestError
from placement.ids import RolloutId
from service.body import openapi_body, read_body
from service.checks import check_counts, check_model, need_tokenizer, prompt_ids
from service.control import RANKS_FOR_WEIGHTS
from service.delivery import FollowedStream, answer_whole
from service.dialect import EVENT_STREAM, dialect_route, explained, generation_answers
from service.errors import error_answers
from service.generation import Generation, make_generation
from service.intake import Intake
from service.openai_answers import OpenAIErrorAnswer, openai_error
from service.vllm_answers import TokensAnswer
from service.vllm_schemas import AbortRequestsBody, TokensBody


def vllm_routes(intake: Intake) -> APIRouter:
    router = APIRouter(tags=["vLLM"], route_class=dialect_route(openai_error))

    @router.post(
        "/inference/v1/generate",
        openapi_extra=openapi_body(TokensBody),
        responses=generation_answers(OpenAIErrorAnswer),
    )
    async def generate(request: Request) -> Response:
        """Token ids in, token ids out. With ``stream``, server-sent events with what is new."""
        body = await read_body(request, TokensBody, intake.settings.max_request_bytes)
        if body.stream_options is not None and not body.stream:
            raise RequestError("needs stream to be true", field="stream_options")
        if body.stream and body.sampling_params.prompt_logprobs is not None:
            raise RequestError(
                "are not streamed; ask without stream", field="sampling_params.prompt_logprobs"
            )
        responses = await intake.start(
            lambda model: _to_generation(body, model, intake), id_field="request_id"
        )
        answer = TokensAnswer(responses, (await intake.served_model()).path, body)
        if body.stream:
            events = explained(answer.events(), openai_error)
            return FollowedStream(responses.following, events, EVENT_STREAM)

        async def whole() -> Response:
            return JSONResponse(await answer.whole())

        return await answer_whole(responses.following, request.receive, whole())

    @router.post(
        "/abort_requests",
        openapi_extra=openapi_body(AbortRequestsBody),
        responses=error_answers(400, 413, 503, shape=OpenAIErrorAnswer),
    )
    async def abort_requests(request: Request) -> Response:
        """End the named requests, or all. Their clients get what there is, with
        ``finish_reason`` "abort". One that is not known has ended: that is no error."""
        body = await read_body(request, AbortRequestsBody, intake.settings.max_request_bytes)
        if body.request_ids:
            await asyncio.gather(
                *(intake.abort_if_known(RolloutId(name)) for name in body.request_ids)
            )
            aborted = len(body.request_ids)
        else:
            aborted = await intake.abort_all()
        return JSONResponse({"status": "aborted", "aborted": aborted})

    @router.get("/get_world_size")
    async def world_size() -> Response:
        """Ranks that the service is in a trainer's group for weights: one, whatever its own width,
        which changes (``/v1/workers``)."""
        return JSONResponse({"world_size": RANKS_FOR_WEIGHTS})

    return router


def _to_generation(body: TokensBody, model: ServedModel, intake: Intake) -> Generation:
    check_model(body.model, model)
    n = body.sampling_params.n
    check_counts(1, n, intake.settings, prompts_field="token_ids", n_field="sampling_params.n")
    if body.output_mode == "text":
        need_tokenizer(intake.tokenizer, "output_mode", model)
    return make_generation(
        [(prompt_ids(body.token_ids, "token_ids", model, intake.tokenizer), "token_ids")],
        [body.wanted()],
        model,
        intake.tokenizer,
        n=n,
        seed=body.sampling_params.seed,
        request_id=body.request_id,
        id_field="request_id",
    )
