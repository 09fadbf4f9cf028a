"""What was asked beside ids and logprobs, in the shapes of the dialects.

vLLM's and SGLang's clients decode routed experts each in their own way; both are one row per
token of prompt and response but the last, all layers, in C order. What is not complete is left
out, and never padded.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.rollout_api import SampleNews, SampleResult
from actors.token_detail import (
    Alternatives,
    PromptScores,
    RoutingLayout,
    TokenDetail,
    routed_rows,
)
from service.checks import Tokenizer
from service.schemas import PromptLogprobsAnswer, RoutedExpertsAnswer


def clamped(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def native_detail(sample: SampleResult) -> dict[str, Any]:
    """The fields of a native answer."""
    fields = _native_logprobs(sample.detail)
    if sample.detail is not None and (layout := sample.detail.layout) is not None:
        num_tokens = sample.prompt_tokens + sample.start + len(sample.token_ids)
        rows = routed_rows(sample.detail, num_tokens)
        fields["routed_experts"] = (
            RoutedExpertsAnswer(None, missing=_missing(sample.detail, layout, num_tokens))
            if rows is None
            else _native_rows(rows.tobytes(), layout)
        )
    return fields


def native_news(news: SampleNews) -> dict[str, Any]:
    """The fields of a native line about new tokens."""
    fields = _native_logprobs(news.detail)
    if news.detail is not None and news.detail.layout is not None:
        fields["routed_experts"] = _native_rows(b"".join(news.detail.routed), news.detail.layout)
    return fields


def _native_logprobs(detail: TokenDetail | None) -> dict[str, Any]:
    if detail is None:
        return {}
    fields: dict[str, Any] = {"top_logprobs": detail.top_logprobs or None}
    if (scores := detail.prompt) is not None:
        logprobs, ranks = zip(*scores.chosen(), strict=True) if scores.logprobs else ((), ())
        tops = tuple(scores.alternatives())
        fields["prompt_logprobs"] = PromptLogprobsAnswer(logprobs, ranks, tops)
    return fields


def _native_rows(rows: bytes, layout: RoutingLayout) -> RoutedExpertsAnswer:
    shape = (len(rows) // layout.row_bytes, layout.layers, layout.top_k)
    return RoutedExpertsAnswer(base64.b64encode(rows).decode(), shape, layout.dtype)


def _missing(detail: TokenDetail, layout: RoutingLayout, num_tokens: int) -> str:
    num_rows = sum(len(rows) for rows in detail.routed) // layout.row_bytes
    return f"{num_rows} rows were told for {num_tokens} tokens, which have {num_tokens - 1}"


def routed_npy(detail: TokenDetail | None, num_tokens: int) -> str | None:
    """As vLLM does: base64 of a ``.npy`` file, in the smallest type."""
    rows = routed_rows(detail, num_tokens)
    if rows is None:
        return None
    with io.BytesIO() as file:
        np.save(file, rows, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def routed_int32(detail: TokenDetail | None, num_tokens: int) -> str | None:
    """As SGLang does: base64 of int32."""
    rows = routed_rows(detail, num_tokens)
    if rows is None:
        return None
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def ranked_prompt(
    prompt: Sequence[int], scores: PromptScores | None, tokenizer: Tokenizer | None
) -> list[dict[int, dict[str, Any]] | None] | None:
    """As vLLM does: per token of the prompt, by token id, itself and its alternatives with their
    ranks; nothing precedes the first one."""
    if scores is None:
        return None

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([token_id])
        return {"logprob": clamped(logprob), "rank": rank, "decoded_token": text}

    told: list[dict[int, dict[str, Any]] | None] = [None]
    places = zip(prompt[1:], scores.chosen(), scores.alternatives(), strict=True)
    for token_id, (logprob, rank), row in places:
        ranked = {token_id: entry(token_id, logprob, rank)}
        for place, (other, other_logprob) in enumerate(row, start=1):
            ranked.setdefault(other, entry(other, other_logprob, place))
        told.append(ranked)
    return told


def alternatives_of(detail: TokenDetail | None, num_tokens: int) -> Sequence[Alternatives]:
    """Per token; none where none were asked for."""
    if detail is not None and detail.top_logprobs:
        return detail.top_logprobs
    return ((),) * num_tokens
