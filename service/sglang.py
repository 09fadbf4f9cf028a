"""The SGLang dialect: routes, and from its requests to ours.

Routes about weights, pauses and memory are ``service.sglang_control``'s.
"""

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from actors.rollout_api import ServedModel
from placement.errors import RequestError
from placement.ids import RolloutId
from service.body import openapi_body, read_body
from service.checks import check_counts, prompt_ids
from service.delivery import FollowedStream, answer_whole
from service.dialect import EVENT_STREAM, dialect_route, explained, generation_answers
from service.errors import ErrorAnswer, error_answers
from service.generation import Generation, make_generation
from service.intake import Intake
from service.sglang_answers import GenerateAnswer, sglang_error
from service.sglang_schemas import AbortBody, GenerateBody, SglangParams


def sglang_routes(intake: Intake) -> APIRouter:
    router = APIRouter(tags=["SGLang"], route_class=dialect_route(sglang_error))

    @router.post(
        "/generate",
        openapi_extra=openapi_body(GenerateBody),
        responses=generation_answers(ErrorAnswer),
    )
    async def generate(request: Request) -> Response:
        """Complete one prompt, or a list of them. With ``stream``, each event has all of its
        response so far."""
        body = await read_body(request, GenerateBody, intake.settings.max_request_bytes)
        is_list = _is_list(body)
        responses = await intake.start(
            lambda model: _to_generation(body, model, intake), id_field="rid"
        )
        answer = GenerateAnswer(responses, body, is_list=is_list)
        if body.stream:
            events = explained(answer.events(), sglang_error)
            return FollowedStream(responses.following, events, EVENT_STREAM)

        async def whole() -> Response:
            return JSONResponse(await answer.whole())

        return await answer_whole(responses.following, request.receive, whole())

    @router.post(
        "/abort_request",
        openapi_extra=openapi_body(AbortBody),
        responses=error_answers(400, 413, 503),
    )
    async def abort_request(request: Request) -> Response:
        """End one request, or all of them. Their clients get what there is, with
        ``finish_reason.type`` "abort". One that is not known has ended: that is no error."""
        body = await read_body(request, AbortBody, intake.settings.max_request_bytes)
        if body.abort_all:
            await intake.abort_all()
        elif not body.rid:
            raise RequestError("is missing; name a request, or set abort_all", field="rid")
        else:
            await intake.abort_if_known(RolloutId(body.rid))
        return JSONResponse({"success": True})

    @router.get("/v1/loads")
    async def loads() -> Response:
        """What runs and what waits, as one load: the queue is one for all workers.

        ``num_total_reqs`` of 0 means that nothing decodes.
        """
        open_rollouts = await intake.coordinator.open_rollouts()
        workers = await intake.coordinator.workers()
        running = sum(rollout.num_running for rollout in open_rollouts)
        waiting = sum(rollout.num_queued for rollout in open_rollouts)
        used = sum(worker.kv_used_tokens for worker in workers)
        capacity = sum(worker.kv_capacity_tokens for worker in workers)
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": used / capacity if capacity else 0.0,
        }
        aggregate = {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
        }
        return JSONResponse(
            {
                "timestamp": time.time(),
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": aggregate,
            }
        )

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 while there is forward progress (or nothing to do), else 503. Decodes nothing of
        its own: a probe must not bring workers back."""
        now = await intake.coordinator.health()
        content = {"healthy": now.healthy, "detail": now.detail}
        return JSONResponse(content, status_code=200 if now.healthy else 503)

    @router.get("/get_weight_version")
    async def weight_version() -> Response:
        """The version of the weights that new samples are decoded with."""
        model = await intake.coordinator.served_model()
        return JSONResponse({"weight_version": model.weight_version})

    return router


def _is_list(body: GenerateBody) -> bool:
    """Raises: RequestError, unless there is exactly one of ``text`` and ``input_ids``."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", field="text")
    if body.input_ids is not None:
        return not body.input_ids or isinstance(body.input_ids[0], list)
    return isinstance(body.text, list)


def _named_prompts(body: GenerateBody) -> list[tuple[str | list[int], str]]:
    """Each prompt, and where it is in the request."""
    field = "text" if body.text is not None else "input_ids"
    if isinstance(body.text, str):
        return [(body.text, field)]
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    many = [prompt for prompt in given if not isinstance(prompt, int)]
    if many:
        return [(prompt, f"{field}[{index}]") for index, prompt in enumerate(many)]
    return [([token_id for token_id in given if isinstance(token_id, int)], field)]


def _named_params(body: GenerateBody, num_prompts: int) -> list[tuple[SglangParams, str]]:
    params = body.sampling_params
    if not isinstance(params, list):
        return [(params or SglangParams(), "sampling_params")] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            f"has {len(params)} entries for {num_prompts} prompts; give one, or one per prompt",
            field="sampling_params",
        )
    for index, one in enumerate(params):
        if one.n != params[0].n:
            raise RequestError(
                f"is {one.n}, but that of the first prompt is {params[0].n}; send prompts with "
                "another n in a request of their own",
                field=f"sampling_params[{index}].n",
            )
    return [(one, f"sampling_params[{index}]") for index, one in enumerate(params)]


def _to_generation(body: GenerateBody, model: ServedModel, intake: Intake) -> Generation:
    prompts = _named_prompts(body)
    params = _named_params(body, len(prompts))
    first = params[0][0]
    check_counts(
        len(prompts),
        first.n,
        intake.settings,
        prompts_field=prompts[0][1].partition("[")[0],
        n_field="sampling_params.n",
    )
    return make_generation(
        [(prompt_ids(prompt, field, model, intake.tokenizer), field) for prompt, field in prompts],
        [one.wanted(inside, body) for one, inside in params],
        model,
        intake.tokenizer,
        n=first.n,
        seed=first.sampling_seed,
        request_id=body.rid,
        id_field="rid",
    )
