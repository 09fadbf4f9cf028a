"""How the SGLang dialect answers ``/generate``."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from actors.token_detail import Alternatives, PromptScores
from placement.errors import FlexFloorError
from placement.samples import FinishReason
from service.details import alternatives_of, clamped, routed_int32
from service.dialect import event
from service.responses import Portion, Responses
from service.sglang_schemas import GenerateBody


@dataclass(frozen=True, slots=True)
class SglangErrorContent:
    message: str
    type: str
    field: str | None


@dataclass(frozen=True, slots=True)
class SglangFailure:
    """Of a control route, whose clients look at ``success`` and ``message``."""

    success: bool
    message: str
    error: SglangErrorContent


def sglang_error(error: FlexFloorError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"error": {"message": str(error), "type": kind, "field": error.field}}


def sglang_failure(error: FlexFloorError) -> dict[str, Any]:
    return {"success": False, "message": str(error), **sglang_error(error)}


@dataclass(slots=True)
class _SoFar:
    """A response as far as it has been told."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Alternatives] = field(default_factory=list)
    prompt: PromptScores | None = None

    def add(self, portion: Portion) -> None:
        self.tops += alternatives_of(portion.detail, len(portion.token_ids))
        if portion.detail is not None:
            self.prompt = self.prompt or portion.detail.prompt
        self.text += portion.text
        self.token_ids += portion.token_ids
        self.logprobs += portion.logprobs


class GenerateAnswer:
    """Args:
    is_list: the request had a list of prompts, so the answer is a list too.
    """

    def __init__(self, responses: Responses, body: GenerateBody, *, is_list: bool) -> None:
        self._responses = responses
        self._tokenizer = responses.tokenizer
        self._body = body
        self._request = responses.generation.rollout
        self._is_list = is_list or self._request.num_samples > 1

    async def whole(self) -> Any:
        answers = []
        for portion in await self._responses.whole():
            so_far = _SoFar()
            so_far.add(portion)
            answers.append(self._answer(portion, so_far))
        return answers if self._is_list else answers[0]

    async def events(self) -> AsyncIterator[bytes]:
        told: dict[int, _SoFar] = {}
        async for portions in self._responses.portions():
            for portion in portions:
                so_far = told.setdefault(portion.index, _SoFar())
                so_far.add(portion)
                answer = self._answer(portion, so_far)
                yield event(answer | {"index": portion.index} if self._is_list else answer)

    def _answer(self, portion: Portion, so_far: _SoFar) -> dict[str, Any]:
        rollout_id = self._request.rollout_id
        meta: dict[str, Any] = {
            "id": f"{rollout_id}_{portion.index}" if self._is_list else rollout_id,
            "finish_reason": _finish_reason(portion, len(so_far.token_ids)),
            "prompt_tokens": len(self._request.prompts[portion.prompt_index]),
            "completion_tokens": len(so_far.token_ids),
            "cached_tokens": 0,
            "weight_version": portion.weight_version,
        }
        if self._body.return_logprob:
            pairs = zip(so_far.logprobs, so_far.token_ids, strict=True)
            meta["output_token_logprobs"] = [
                (logprob, token_id, self._token_text(token_id)) for logprob, token_id in pairs
            ]
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = [self._alternatives(row) for row in so_far.tops]
            if so_far.prompt is not None:
                meta |= self._input_logprobs(portion, so_far.prompt)
        if self._body.return_routed_experts and portion.finish_reason is not None:
            num_tokens = meta["prompt_tokens"] + len(so_far.token_ids)
            meta["routed_experts"] = routed_int32(portion.whole_detail, num_tokens)
        return {"text": so_far.text, "output_ids": list(so_far.token_ids), "meta_info": meta}

    def _alternatives(self, row: Alternatives) -> list[tuple[float, int, str | None]]:
        return [(clamped(logprob), token, self._token_text(token)) for token, logprob in row]

    def _input_logprobs(self, portion: Portion, scores: PromptScores) -> dict[str, Any]:
        start = self._body.logprob_start_len or 0
        prompt = self._request.prompts[portion.prompt_index]
        chosen = [None, *(clamped(logprob) for logprob, _ in scores.chosen())]
        chosen[start : start + 1] = [None] * (start < len(chosen))
        told = list(zip(chosen, prompt, map(self._token_text, prompt), strict=True))
        meta: dict[str, Any] = {"input_token_logprobs": told[start:]}
        if self._body.top_logprobs_num:
            rows = [self._alternatives(row) for row in scores.alternatives()]
            meta["input_top_logprobs"] = [None, *rows[start:]] if start < len(prompt) else []
        return meta

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None or not self._body.return_text_in_logprobs:
            return None
        return self._tokenizer.decode([token_id])


def _finish_reason(portion: Portion, num_tokens: int) -> dict[str, Any] | None:
    if portion.finish_reason is None:
        return None
    reason: dict[str, Any] = {"type": str(portion.finish_reason)}
    if portion.finish_reason is FinishReason.STOP:
        last = portion.token_ids[-1] if portion.token_ids else None
        reason["matched"] = last if portion.stop_reason is None else portion.stop_reason
    elif portion.finish_reason is FinishReason.LENGTH:
        reason["length"] = num_tokens
    elif portion.finish_reason is FinishReason.ABORT:
        reason["message"] = "aborted"
    return reason
