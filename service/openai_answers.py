"""How the OpenAI dialect answers: one object, or a stream of events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from actors.token_detail import Alternatives
from placement.errors import FlexFloorError
from service.checks import Tokenizer
from service.details import alternatives_of, clamped, ranked_prompt, routed_npy
from service.dialect import event
from service.errors import status_code
from service.openai_schemas import ChatBody, CompletionBody
from service.responses import Portion, Responses

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 401: "AuthenticationError"}


@dataclass(frozen=True, slots=True)
class OpenAIErrorContent:
    message: str
    type: str
    param: str | None
    code: int


@dataclass(frozen=True, slots=True)
class OpenAIErrorAnswer:
    error: OpenAIErrorContent


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
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = token_text(token_id, tokenizer, as_id=as_ids)
        return {"token": token, "logprob": clamped(logprob), "bytes": list(token.encode())}

    rows = alternatives_of(portion.detail, len(portion.token_ids))
    content = []
    for token_id, logprob, row in zip(portion.token_ids, portion.logprobs, rows, strict=True):
        others = [entry(other, other_logprob) for other, other_logprob in row]
        content.append(entry(token_id, logprob) | {"top_logprobs": others})
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
        whole = self._object(self.whole_object, choices) | {"usage": self._usage()}
        return whole | self.beside_choices(portions)

    def beside_choices(self, portions: list[Portion]) -> dict[str, Any]:
        """What a whole answer has once, for all its responses."""
        return {}

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

    def _ending(self, portion: Portion, routed: bool | None) -> dict[str, Any]:
        ending = {
            "index": portion.index,
            "finish_reason": portion.finish_reason,
            "stop_reason": portion.stop_reason,
        }
        if not routed or portion.finish_reason is None:
            return ending
        num_tokens = len(self._prompt(portion)) + portion.start + len(portion.token_ids)
        return ending | {"routed_experts": routed_npy(portion.whole_detail, num_tokens)}

    def _prompt(self, portion: Portion) -> tuple[int, ...]:
        return self._responses.generation.rollout.prompts[portion.prompt_index]

    def _prompt_logprobs(self, portion: Portion, wanted: int | None) -> dict[str, Any]:
        detail = portion.whole_detail
        if wanted is None or detail is None:
            return {}
        ranked = ranked_prompt(self._prompt(portion), detail.prompt, self._tokenizer)
        return {"prompt_logprobs": ranked}

    def _ids(self, portion: Portion, wanted: bool | None) -> dict[str, Any]:
        if not wanted:
            return {}
        ids: dict[str, Any] = {"token_ids": portion.token_ids}
        return ids if portion.start else ids | {"prompt_token_ids": self._prompt(portion)}


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
            **self._prompt_logprobs(portion, self._body.prompt_logprobs),
            **self._ending(portion, self._body.return_routed_experts),
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
        rows = alternatives_of(portion.detail, len(portion.token_ids))
        entries: list[tuple[int, float | None, Alternatives]] = list(
            zip(portion.token_ids, portion.logprobs, rows, strict=True)
        )
        if self._body.echo and portion.start == 0:
            entries = self._prompt_entries(portion) + entries
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets = []
        chars = self._text_chars.get(portion.index, 0)
        for token_id, logprob, row in entries:
            tokens.append(self._token(token_id))
            logprobs.append(None if logprob is None else clamped(logprob))
            known = () if logprob is None else ((token_id, logprob), *row)
            tops.append({self._token(t): clamped(lp) for t, lp in known} or None)
            offsets.append(chars)
            chars += len(tokens[-1])
        self._text_chars[portion.index] = chars
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return token_text(token_id, self._tokenizer, as_id=as_ids)

    def _prompt_entries(self, portion: Portion) -> list[tuple[int, float | None, Alternatives]]:
        """The prompt's tokens as entries before the response's; nothing precedes the first."""
        prompt, detail = self._prompt(portion), portion.detail
        if detail is None or detail.prompt is None:
            return []  # it was aborted before its first token
        rows = (row[: self._body.logprobs] for row in detail.prompt.alternatives())
        logprobs = (logprob for logprob, _ in detail.prompt.chosen())
        return [(prompt[0], None, ()), *zip(prompt[1:], logprobs, rows, strict=True)]


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
            **self._ending(portion, self._body.return_routed_experts),
        }

    def beside_choices(self, portions: list[Portion]) -> dict[str, Any]:
        told = self._prompt_logprobs(portions[0], self._body.prompt_logprobs)
        if self._body.return_token_ids:  # vLLM puts them here; there is one prompt
            told["prompt_token_ids"] = self._prompt(portions[0])
        return told

    def first_chunks(self, portion: Portion) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": portion.index, "delta": delta, "finish_reason": None, "logprobs": None}]

    def chunk(self, portion: Portion) -> dict[str, Any]:
        return {
            "delta": {"content": portion.text} if portion.text else {},
            "logprobs": self._logprobs(portion),
            **self._ids(portion, self._body.return_token_ids),
            **self._ending(portion, self._body.return_routed_experts),
        }

    def worth_a_chunk(self, portion: Portion) -> bool:
        wants_tokens = bool(self._body.logprobs or self._body.return_token_ids)
        return wants_tokens or super().worth_a_chunk(portion)

    def _logprobs(self, portion: Portion) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(portion, self._tokenizer, as_ids=as_ids)
