"""The OpenAI dialect: routes, and from its requests to ours."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError

from actors.rollout_api import ServedModel
from placement.errors import RequestError
from service.body import openapi_body, read_body
from service.checks import Tokenizer, check_counts, check_model, need_tokenizer, prompt_ids
from service.delivery import FollowedStream, answer_whole
from service.dialect import EVENT_STREAM, dialect_route, explained, generation_answers
from service.generation import Generation, Wanted, make_generation
from service.intake import Intake
from service.openai_answers import (
    ChatAnswer,
    CompletionAnswer,
    OpenAIErrorAnswer,
    openai_error,
)
from service.openai_schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    Message,
    OpenAIBody,
)

REQUEST_ID_HEADER = "x-request-id"


def openai_routes(intake: Intake) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=dialect_route(openai_error))

    async def deliver(
        request: Request, body: OpenAIBody, answer: CompletionAnswer | ChatAnswer
    ) -> Response:
        following = answer.following
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = explained(answer.events(include_usage=include_usage), openai_error)
            return FollowedStream(following, events, EVENT_STREAM)

        async def whole() -> Response:
            return JSONResponse(await answer.whole())

        return await answer_whole(following, request.receive, whole())

    answers = generation_answers(OpenAIErrorAnswer)

    @router.post("/v1/completions", openapi_extra=openapi_body(CompletionBody), responses=answers)
    async def completions(request: Request) -> Response:
        """Complete prompts. With ``stream``, server-sent events with what is new."""
        body = await read_body(request, CompletionBody, intake.settings.max_request_bytes)
        request_id = _request_id(request, body)
        _check_stream_options(body)
        echoed: list[str] = []

        def translate(model: ServedModel) -> Generation:
            generation = _from_completion(body, request_id, model, intake)
            if body.echo:
                tokenizer = need_tokenizer(intake.tokenizer, "echo", model)
                echoed.extend(
                    tokenizer.decode(list(prompt), skip_special_tokens=body.skip_special_tokens)
                    for prompt in generation.rollout.prompts
                )
            return generation

        responses = await intake.start(translate, id_field="request_id")
        model = (await intake.served_model()).path
        return await deliver(request, body, CompletionAnswer(responses, model, body, tuple(echoed)))

    @router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody), responses=answers)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, put into a prompt by the checkpoint's chat template."""
        body = await read_body(request, ChatBody, intake.settings.max_request_bytes)
        request_id = _request_id(request, body)
        _check_stream_options(body)
        responses = await intake.start(
            lambda model: _from_chat(body, request_id, model, intake), id_field="request_id"
        )
        model = (await intake.served_model()).path
        return await deliver(request, body, ChatAnswer(responses, model, body))

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        model = await intake.served_model()
        entry = {
            "id": model.path,
            "object": "model",
            "created": 0,
            "owned_by": "flexfloor",
            "root": model.path,
            "parent": None,
            "max_model_len": model.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    return router


def _request_id(request: Request, body: OpenAIBody) -> str | None:
    return body.request_id or request.headers.get(REQUEST_ID_HEADER)


def _check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("needs stream to be true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("are not streamed; ask without stream", field="prompt_logprobs")


def render_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    field: str,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Raises: RequestError, with what the checkpoint's template says."""
    try:
        return tokenizer.apply_chat_template(
            [message.as_template_input() for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except (ValueError, TypeError, TemplateError) as error:
        raise RequestError(
            f"the chat template cannot take these messages: {error}", field=field
        ) from error


def _wanted(
    body: OpenAIBody,
    max_tokens: int | None,
    default_tokens: int | None = None,
    *,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
) -> Wanted:
    return Wanted(
        max_tokens=max_tokens,
        default_tokens=default_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        top_logprobs=top_logprobs or 0,
        prompt_logprobs=prompt_logprobs,
        routed_experts=bool(body.return_routed_experts),
        names={"routed_experts": "return_routed_experts"},
    )


def _from_completion(
    body: CompletionBody, request_id: str | None, model: ServedModel, intake: Intake
) -> Generation:
    check_model(body.model, model)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    prompts = _named_prompts(body)
    check_counts(len(prompts), body.n or 1, intake.settings, prompts_field="prompt", n_field="n")
    wanted = _wanted(
        body,
        body.max_tokens,
        DEFAULT_COMPLETION_TOKENS,
        top_logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return make_generation(
        [(prompt_ids(prompt, field, model, intake.tokenizer), field) for prompt, field in prompts],
        [wanted] * len(prompts),
        model,
        intake.tokenizer,
        n=body.n or 1,
        seed=body.seed,
        request_id=request_id,
        id_field="request_id",
        id_prefix="cmpl-",
    )


def _named_prompts(body: CompletionBody) -> list[tuple[str | list[int], str]]:
    """Each prompt, and where it is in the request."""
    given = body.prompt
    if isinstance(given, str):
        return [(given, "prompt")]
    several = [prompt for prompt in given if not isinstance(prompt, int)]
    if several:
        return [(prompt, f"prompt[{index}]") for index, prompt in enumerate(several)]
    return [([token_id for token_id in given if isinstance(token_id, int)], "prompt")]


def _from_chat(
    body: ChatBody, request_id: str | None, model: ServedModel, intake: Intake
) -> Generation:
    check_model(body.model, model)
    check_counts(1, body.n or 1, intake.settings, prompts_field="messages", n_field="n")
    tokenizer = need_tokenizer(intake.tokenizer, "messages", model)
    text = render_chat(
        body.messages,
        tokenizer,
        "messages",
        add_generation_prompt=body.add_generation_prompt,
    )
    prompt = prompt_ids(
        tokenizer.encode(text, add_special_tokens=False), "messages", model, tokenizer
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError("needs logprobs to be true", field="top_logprobs")
    wanted = _wanted(
        body, max_tokens, top_logprobs=body.top_logprobs, prompt_logprobs=body.prompt_logprobs
    )
    return make_generation(
        [(prompt, "messages")],
        [wanted],
        model,
        tokenizer,
        n=body.n or 1,
        seed=body.seed,
        request_id=request_id,
        id_field="request_id",
        id_prefix="chatcmpl-",
    )
