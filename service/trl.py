"""The dialect of ``trl vllm-serve``: routes, and from its requests to ours.

All its paths end with a slash, so ``/generate/`` is TRL's and ``/generate`` SGLang's. TRL's
clients after 1.13 speak the dialects of OpenAI and vLLM instead. The communicator, vLLM's own
rendezvous over NCCL in which the trainer is the last rank, is not served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from actors.rollout_api import ServedModel
from placement.errors import RequestError
from service.body import openapi_body, read_body
from service.checks import check_counts, need_tokenizer, prompt_ids
from service.control import RANKS_FOR_WEIGHTS
from service.delivery import answer_whole
from service.dialect import dialect_route
from service.errors import NotServedError, describe, error_answers
from service.generation import Generation, Wanted, make_generation
from service.intake import Intake
from service.openai import render_chat
from service.trl_answers import Scored, generated
from service.trl_schemas import SequenceLogprobsBody, TrlChatBody, TrlGenerateBody
from service.vllm_schemas import VllmParams

TRL_BODIES = (TrlGenerateBody, TrlChatBody, SequenceLogprobsBody)


def trl_routes(intake: Intake) -> APIRouter:
    router = APIRouter(
        tags=["TRL"],
        route_class=dialect_route(describe),
        responses=error_answers(400, 413, 429, 503),
    )
    _add_generation_routes(router, intake)
    _add_scoring_route(router, intake)
    _add_control_routes(router, intake)
    return router


def _add_generation_routes(router: APIRouter, intake: Intake) -> None:
    max_bytes = intake.settings.max_request_bytes

    async def answer(
        request: Request, params: VllmParams, translate: Callable[[ServedModel], Generation]
    ) -> Response:
        responses = await intake.start(translate, id_field="request_id")

        async def whole() -> Response:
            told = await generated(responses, with_logprobs=params.logprobs is not None)
            return JSONResponse(told)

        return await answer_whole(responses.following, request.receive, whole())

    @router.post("/generate/", openapi_extra=openapi_body(TrlGenerateBody))
    async def generate(request: Request) -> Response:
        """Complete a batch of prompts."""
        body = await read_body(request, TrlGenerateBody, max_bytes)
        params = body.params()

        def translate(model: ServedModel) -> Generation:
            return _generation(_tokenized(body.prompts, "prompts", model, intake), params, intake)

        return await answer(request, params, translate)

    @router.post("/chat/", openapi_extra=openapi_body(TrlChatBody))
    async def chat(request: Request) -> Response:
        """Answer a batch of conversations."""
        body = await read_body(request, TrlChatBody, max_bytes)
        params = body.params()

        def translate(model: ServedModel) -> Generation:
            tokenizer = need_tokenizer(intake.tokenizer, "messages", model)
            rendered = [
                tokenizer.encode(
                    render_chat(conversation, tokenizer, f"messages[{number}]"),
                    add_special_tokens=False,
                )
                for number, conversation in enumerate(body.messages)
            ]
            return _generation(_tokenized(rendered, "messages", model, intake), params, intake)

        return await answer(request, params, translate)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Token ids, and the field that each came from."""

    model: ServedModel
    field: str
    named: tuple[tuple[tuple[int, ...], str], ...]


def _tokenized(
    prompts: Sequence[str | list[int]], field: str, model: ServedModel, intake: Intake
) -> _Prompts:
    """Raises: RequestError."""
    named = tuple(
        (prompt_ids(prompt, f"{field}[{number}]", model, intake.tokenizer), f"{field}[{number}]")
        for number, prompt in enumerate(prompts)
    )
    return _Prompts(model, field, named)


def _generation(prompts: _Prompts, params: VllmParams, intake: Intake) -> Generation:
    """Raises: RequestError."""
    return _same_for_all(prompts, params.wanted(), params.n, params.seed, intake)


def _same_for_all(
    prompts: _Prompts, wanted: Wanted, n: int, seed: int | None, intake: Intake
) -> Generation:
    """Raises: RequestError."""
    named = prompts.named
    check_counts(len(named), n, intake.settings, prompts_field=prompts.field, n_field="n")
    return make_generation(
        named,
        [wanted] * len(named),
        prompts.model,
        intake.tokenizer,
        n=n,
        seed=seed,
        request_id=None,
        id_field="request_id",
        id_prefix="trl-",
    )


def _add_scoring_route(router: APIRouter, intake: Intake) -> None:
    @router.post("/get_sequence_logprobs/", openapi_extra=openapi_body(SequenceLogprobsBody))
    async def sequence_logprobs(request: Request) -> Response:
        """How likely the tokens of given sequences are behind their prompts, each given those
        before it, with the most likely alternatives."""
        max_bytes = intake.settings.max_request_bytes
        body = await read_body(request, SequenceLogprobsBody, max_bytes)
        wanted = Wanted(
            max_tokens=0, temperature=body.temperature, prompt_logprobs=body.top_logprobs
        )

        def translate(model: ServedModel) -> Generation:
            sequences = _tokenized(body.sequences, "sequences", model, intake)
            return _same_for_all(sequences, wanted, 1, 0, intake)

        responses = await intake.start(translate, id_field="request_id")
        scored = Scored(body.prompt_lengths, body.top_logprobs)

        async def whole() -> Response:
            portions = await responses.whole()
            scores = [p.whole_detail.prompt if p.whole_detail else None for p in portions]
            tell = scored.as_arrays if body.response_format == "binary" else scored.as_lists
            return JSONResponse(tell(responses.generation.rollout.prompts, scores))

        return await answer_whole(responses.following, request.receive, whole())


def _add_control_routes(router: APIRouter, intake: Intake) -> None:
    @router.get("/health/")
    async def health() -> Response:
        """200 while there is forward progress, or nothing to do."""
        now = await intake.coordinator.health()
        status = "ok" if now.healthy else "stuck"
        content = {"status": status, "detail": now.detail}
        return JSONResponse(content, status_code=200 if now.healthy else 503)

    @router.get("/get_world_size/")
    async def world_size() -> Response:
        """Ranks that the service is in a trainer's group for weights, whatever its width."""
        return JSONResponse({"world_size": RANKS_FOR_WEIGHTS})

    @router.post("/init_communicator/", responses=error_answers(501))
    async def init_communicator() -> Response:
        """Not served (501): it is vLLM's own rendezvous over NCCL."""
        raise _no_communicator()

    @router.post("/update_named_param/", responses=error_answers(501))
    async def update_named_param() -> Response:
        """Not served (501): it needs the communicator."""
        raise _no_communicator()

    @router.post("/batch_update_named_params/", responses=error_answers(501))
    async def batch_update_named_params() -> Response:
        """Not served (501): it needs the communicator."""
        raise _no_communicator()

    @router.post("/reset_prefix_cache/")
    async def reset_prefix_cache() -> Response:
        """200 if no KV computed before now is left, which is so when nothing runs; else 400."""
        if not await intake.coordinator.reset_prefix_cache():
            raise RequestError("samples run with KV of their own; wait for them, or abort them")
        return JSONResponse({"message": "no KV of before is left"})

    @router.post("/close_communicator/")
    async def close_communicator() -> Response:
        """There is none, so it is closed."""
        return JSONResponse({"message": "there is no communicator"})


def _no_communicator() -> NotServedError:
    return NotServedError(
        "TRL's communicator is not served: write the weights to a directory and send its path to "
        "PUT /v1/weights, or join a torch.distributed group by /init_weight_transfer_engine"
    )
