"""How the vLLM dialect answers ``/inference/v1/generate``."""

from collections.abc import AsyncIterator
from typing import Any

from service.details import alternatives_of, clamped, ranked_prompt, routed_npy
from service.dialect import event
from service.openai_answers import chat_logprobs, usage_of
from service.responses import Portion, Responses
from service.vllm_schemas import TokensBody


class TokensAnswer:
    def __init__(self, responses: Responses, model: str, body: TokensBody) -> None:
        self._responses = responses
        self._model = model
        self._body = body
        self._completion_tokens = 0

    async def whole(self) -> dict[str, Any]:
        portions = await self._responses.whole()
        self._completion_tokens = sum(len(portion.token_ids) for portion in portions)
        choices = [self._choice(portion, len(portion.token_ids)) for portion in portions]
        return {
            **self._object(choices),
            "created": int(self._responses.following.status.accepted_at),
            "model": self._model,
            "usage": self._usage(),
            "prompt_token_ids": self._prompt() if self._body.return_token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(portions[0]),
        }

    async def events(self) -> AsyncIterator[bytes]:
        prompt = {"prompt_token_ids": self._prompt()} if self._body.return_token_ids else {}
        async for portions in self._responses.portions():
            for portion in portions:
                self._completion_tokens += len(portion.token_ids)
                total = portion.start + len(portion.token_ids)
                yield event(self._object([self._choice(portion, total)]) | prompt)
                prompt = {}  # the first event alone has it
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event(self._object([]) | {"usage": self._usage()})

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "request_id": self._responses.following.status.rollout_id,
            "output_mode": self._body.output_mode,
            "choices": choices,
        }

    def _prompt(self) -> tuple[int, ...]:
        return self._responses.generation.rollout.prompts[0]

    def _prompt_logprobs(self, portion: Portion) -> list[dict[int, dict[str, Any]] | None] | None:
        detail = portion.whole_detail
        if self._body.sampling_params.prompt_logprobs is None or detail is None:
            return None
        return ranked_prompt(self._prompt(), detail.prompt, self._responses.tokenizer)

    def _usage(self) -> dict[str, int]:
        return usage_of(self._responses.generation.prompt_tokens, self._completion_tokens)

    def _choice(self, portion: Portion, total_tokens: int) -> dict[str, Any]:
        """``total_tokens``: of the response, this portion included."""
        ended = portion.finish_reason is not None
        choice: dict[str, Any] = {
            "index": portion.index,
            "finish_reason": portion.finish_reason,
            "stop_reason": portion.stop_reason,
            "token_ids": portion.token_ids,
            "logprobs": self._logprobs(portion),
            "weight_versions": _spans(portion, total_tokens) if ended else None,
        }
        if self._body.return_routed_experts and ended:
            num_tokens = len(self._prompt()) + total_tokens
            choice["routed_experts"] = routed_npy(portion.whole_detail, num_tokens)
        return choice | {"text": portion.text} if self._body.output_mode == "text" else choice

    def _logprobs(self, portion: Portion) -> dict[str, Any] | None:
        if self._body.sampling_params.logprobs is None:
            return None
        if self._body.output_mode == "text":
            return chat_logprobs(portion, self._responses.tokenizer, as_ids=False)
        rows = alternatives_of(portion.detail, len(portion.token_ids))
        content = []
        for token_id, logprob, row in zip(portion.token_ids, portion.logprobs, rows, strict=True):
            others = [_entry(other, lp, rank) for rank, (other, lp) in enumerate(row, start=1)]
            # Of a token that is none of the most likely ones the rank is not known.
            drawn = next((e for e in others if e["token_id"] == token_id), None)
            drawn = drawn or _entry(token_id, logprob, None)
            content.append(drawn | {"top_logprobs": others or [drawn]})
        return {"content": content}


def _spans(portion: Portion, total_tokens: int) -> list[dict[str, Any]]:
    """Of the last portion: with which weights which tokens of the response came."""
    starts = portion.weight_versions or ((0, portion.weight_version),)
    ends = [*(start for start, _ in starts[1:]), total_tokens]
    return [
        {"version": version, "start": start, "end": end}
        for (start, version), end in zip(starts, ends, strict=True)
    ]


def _entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": clamped(logprob), "rank": rank}
