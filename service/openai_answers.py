"""How the OpenAI dialect answers: one object, or a stream of events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from placement.errors import FlexFloorError
from service.checks import Tokenizer
from service.dialect import event
from service.errors import status_code
from service.openai_schemas import ChatBody, CompletionBody
from service.responses import Portion, Responses

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 401: "AuthenticationError"}


def openai_error(error: FlexFloorError) -> dict[str, Any]:
    code = status_code(error)
    return {
        "error": {
            "message": error.message,
            "type": _KINDS.get(code, type(error).__name__),
            "param": error.field,
            "code": code,
        }
    }


def clamped(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_text(token_id: int, tokenizer: Tokenizer | None, *, as_id: bool) -> str:
    if as_id or tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id])


def chat_logprobs(portion: Portion, tokenizer: Tokenizer | None, *, as_ids: bool) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(portion.token_ids, portion.logprobs, strict=True):
        token = token_text(token_id, tokenizer, as_id=as_ids)
        content.append(
            {
                "token": token,
                "logprob": clamped(logprob),
                "bytes": list(token.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": content}


class _Answer(ABC):
    """What both kinds of completion have in common."""

    whole_object = chunk_object = ""

    def __init__(self, responses: Responses, model: str) -> None:
        self.following = responses.following
        self._responses = responses
        self._tokenizer = responses.tokenizer
        self._model = model
        self._completion_tokens = 0

    @abstractmethod
    def choice(self, portion: Portion) -> dict[str, Any]:
        """A whole response."""

    def first_chunks(self, portion: Portion) -> list[dict[str, Any]]:
        """Choices that go before the first portion of a response."""
        return []

    @abstractmethod
    def chunk(self, portion: Portion) -> dict[str, Any]:
        """What is new of a response."""

    def worth_a_chunk(self, portion: Portion) -> bool:
        return bool(portion.text) or portion.finish_reason is not None

    async def whole(self) -> dict[str, Any]:
        portions = await self._responses.whole()
        self._completion_tokens = sum(len(portion.token_ids) for portion in portions)
        choices = [self.choice(portion) for portion in portions]
        return self._object(self.whole_object, choices) | {"usage": self._usage()}

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async for portions in self._responses.portions():
            for portion in portions:
                self._completion_tokens += len(portion.token_ids)
                choices = []
                if portion.index not in begun:
                    begun.add(portion.index)
                    choices += self.first_chunks(portion)
                if self.worth_a_chunk(portion):
                    choices.append(self.chunk(portion))
                for choice in choices:
                    yield event(self._object(self.chunk_object, [choice]))
        if include_usage:
            yield event(self._object(self.chunk_object, []) | {"usage": self._usage()})

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        status = self.following.status
        return {
            "id": status.rollout_id,
            "object": kind,
            "created": int(status.accepted_at),
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        return usage_of(self._responses.generation.prompt_tokens, self._completion_tokens)

    def _ending(self, portion: Portion) -> dict[str, Any]:
        return {
            "index": portion.index,
            "finish_reason": portion.finish_reason,
            "stop_reason": portion.stop_reason,
        }

    def _ids(self, portion: Portion, wanted: bool | None) -> dict[str, Any]:
        if not wanted:
            return {}
        prompt = self._responses.generation.rollout.prompts[portion.prompt_index]
        ids: dict[str, Any] = {"token_ids": portion.token_ids}
        return ids if portion.start else ids | {"prompt_token_ids": prompt}


class CompletionAnswer(_Answer):
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, responses: Responses, model: str, body: CompletionBody, echoed: tuple[str, ...]
    ) -> None:
        """``echoed``: a text per prompt, or nothing."""
        super().__init__(responses, model)
        self._body = body
        self._echoed = echoed
        self._text_chars: dict[int, int] = {}

    def choice(self, portion: Portion) -> dict[str, Any]:
        echoed = self._echoed[portion.prompt_index] if self._echoed and not portion.start else ""
        return {
            "text": echoed + portion.text,
            "logprobs": self._logprobs(portion),
            **self._ids(portion, self._body.return_token_ids),
            **self._ending(portion),
        }

    def chunk(self, portion: Portion) -> dict[str, Any]:
        return self.choice(portion)

    def worth_a_chunk(self, portion: Portion) -> bool:
        wants_tokens = self._body.logprobs is not None or bool(self._body.return_token_ids)
        begins = bool(self._echoed) and not portion.start
        return wants_tokens or begins or super().worth_a_chunk(portion)

    def _logprobs(self, portion: Portion) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        tokens = [token_text(token, self._tokenizer, as_id=as_ids) for token in portion.token_ids]
        offsets = []
        chars = self._text_chars.get(portion.index, 0)
        for token in tokens:
            offsets.append(chars)
            chars += len(token)
        self._text_chars[portion.index] = chars
        logprobs = [clamped(logprob) for logprob in portion.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": [{t: lp} for t, lp in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }


class ChatAnswer(_Answer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, responses: Responses, model: str, body: ChatBody) -> None:
        super().__init__(responses, model)
        self._body = body

    def choice(self, portion: Portion) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": portion.text},
            "logprobs": self._logprobs(portion),
            **self._ids(portion, self._body.return_token_ids),
            **self._ending(portion),
        }

    def first_chunks(self, portion: Portion) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": portion.index, "delta": delta, "finish_reason": None, "logprobs": None}]

    def chunk(self, portion: Portion) -> dict[str, Any]:
        return {
            "delta": {"content": portion.text} if portion.text else {},
            "logprobs": self._logprobs(portion),
            **self._ids(portion, self._body.return_token_ids),
            **self._ending(portion),
        }

    def worth_a_chunk(self, portion: Portion) -> bool:
        wants_tokens = bool(self._body.logprobs or self._body.return_token_ids)
        return wants_tokens or super().worth_a_chunk(portion)

    def _logprobs(self, portion: Portion) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(portion, self._tokenizer, as_ids=as_ids)
