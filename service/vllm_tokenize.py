"""vLLM's routes between text and token ids, by the tokenizer of the checkpoint."""

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from actors.rollout_api import ServedModel
from placement.errors import RequestError
from service.body import openapi_body, read_body
from service.checks import check_model, check_vocabulary, need_tokenizer
from service.dialect import DialectBody, TokenId, dialect_route
from service.errors import error_answers
from service.intake import Intake
from service.openai import render_chat
from service.openai_answers import OpenAIErrorAnswer, openai_error
from service.openai_schemas import Message


class TokenizeBody(DialectBody):
    """A text, or a conversation that the checkpoint's chat template makes one."""

    neutral: ClassVar[dict[str, Any]] = {
        "return_token_strs": (False, None),
        "continue_final_message": (False, None),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "media_io_kwargs": (None, {}),
        "mm_processor_kwargs": (None, {}),
        "tools": (None, []),
    }

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    """Instead of ``prompt``."""
    model: str | None = None
    add_special_tokens: bool | None = None
    """Without it true for a prompt, and false for messages, whose template adds its own."""
    add_generation_prompt: bool = True


class DetokenizeBody(DialectBody):
    tokens: list[TokenId]
    model: str | None = None


def vllm_tokenize_routes(intake: Intake) -> APIRouter:
    router = APIRouter(tags=["vLLM"], route_class=dialect_route(openai_error))
    max_bytes = intake.settings.max_request_bytes
    errors = error_answers(400, 404, 413, 503, shape=OpenAIErrorAnswer)

    @router.post("/tokenize", openapi_extra=openapi_body(TokenizeBody), responses=errors)
    async def tokenize(request: Request) -> dict[str, Any]:
        """The token ids of a prompt or of a conversation."""
        body = await read_body(request, TokenizeBody, max_bytes)
        model = await intake.served_model()
        tokens = await asyncio.to_thread(_tokens, body, model, intake)
        return {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }

    @router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody), responses=errors)
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of token ids."""
        body = await read_body(request, DetokenizeBody, max_bytes)
        model = await intake.served_model()
        check_model(body.model, model)
        check_vocabulary(body.tokens, "tokens", model)
        tokenizer = need_tokenizer(intake.tokenizer, "tokens", model)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}

    return router


def _tokens(body: TokenizeBody, model: ServedModel, intake: Intake) -> list[int]:
    check_model(body.model, model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", field="prompt")
    field = "prompt" if body.messages is None else "messages"
    tokenizer = need_tokenizer(intake.tokenizer, field, model)
    if body.messages is None:
        text = body.prompt or ""
    else:
        text = render_chat(
            body.messages, tokenizer, field, add_generation_prompt=body.add_generation_prompt
        )
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    return tokenizer.encode(text, add_special_tokens=special)
